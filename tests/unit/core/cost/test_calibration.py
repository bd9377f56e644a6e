"""What was measured of devices: it survives JSON, and says what they do together."""

from __future__ import annotations

import json

import pytest

from hetexp.core.cost.calibration import DeviceCalibration, Exchange, joint_seconds
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel, Links

FAST = DeviceCalibration(SpeedCurve(0.01, 0.001), 0.5, 0.02, 0.01, ((8, 0.018), (64, 0.074)))
SLOW = DeviceCalibration(SpeedCurve(0.01, 0.003, ((16, 0.004),), update_seconds=0.002), 0.5, 0.02, 0.01)
FREE = Links(device=(Channel(), Channel()), exchange=(Channel(),), staged=False)


@pytest.mark.parametrize("device", [FAST, SLOW])
def test_it_survives_json(device: DeviceCalibration) -> None:
    assert DeviceCalibration.from_dict(json.loads(json.dumps(device.to_dict()))) == device


@pytest.mark.parametrize(
    "exchange",
    [
        Exchange(),
        Exchange(((0.5, 10), (1.0, 4)), Channel(1e-4, 1e9), 0.02, 0.01),
        Exchange(measured=Channel(1e-4, 9e9, shared=True)),
    ],
)
def test_the_exchange_survives_json(exchange: Exchange) -> None:
    assert Exchange.from_dict(json.loads(json.dumps(exchange.to_dict()))) == exchange


def test_a_plan_of_before_tells_of_a_ring() -> None:
    raw = Exchange(measured=Channel(1e-4, 1e9)).to_dict() | {"measured": [1e-4, 1e9]}
    assert Exchange.from_dict(raw).measured == Channel(1e-4, 1e9)


@pytest.mark.parametrize("raw", [{}, {"curve": 3}, {**FAST.to_dict(), "points": [[1]]}])
def test_what_is_none_is_told(raw: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="calibration|curve|unpack"):
        DeviceCalibration.from_dict(raw)


def test_together_they_take_what_the_slowest_takes_and_the_exchange() -> None:
    assert joint_seconds([FAST, SLOW], (64, 16), FREE, Exchange()) == pytest.approx(0.074)
    assert joint_seconds([FAST, SLOW], (1, 16), FREE, Exchange()) == pytest.approx(0.06)
    # 1 s of exchange after the last gradient, twice (n − 1) / n of the bytes.
    slow_link = Links(device=(Channel(), Channel()), exchange=(Channel(0.0, 1e6),), staged=False)
    exchange = Exchange(((1.0, 10**6),), data_seconds=0.1, other_seconds=0.5)
    assert joint_seconds([FAST, SLOW], (64, 16), slow_link, exchange) == pytest.approx(1.674)


def test_alone_there_is_no_exchange_and_samples_are_waited_for() -> None:
    alone = Links(device=(Channel(),), exchange=(Channel(1.0, 1.0),), staged=False)
    exchange = Exchange(((1.0, 10),), data_seconds=0.04, other_seconds=3.0)
    assert joint_seconds([SLOW], (16,), alone, exchange) == pytest.approx(0.1)


@pytest.mark.parametrize(("given", "held"), [(None, 40), (50, 40), (30, 30)])
def test_the_smaller_of_two_limits_holds(given: int | None, held: int) -> None:
    limited = DeviceCalibration(SpeedCurve(0.01, 0.001, microbatch_size=40, cap=40), 0.5, 0.0, 0.0)
    assert limited.capped(given).curve.cap == held
    assert limited.split_microbatches(given).curve.microbatch_size == held
    assert FAST.capped(given).curve.cap == given
