"""What is known of devices that are changed: measurements stay with their devices."""

from __future__ import annotations

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.device import DeviceSpec
from hetexp.plan.device_estimates import CATALOGUE, MEASURED, NOTHING, DeviceEstimates

SPECS = tuple(DeviceSpec(f"cuda:{i}", "cuda", i, f"Card {i}", "nvidia") for i in range(3))


def curve(seconds: float) -> DeviceCalibration:
    return DeviceCalibration(SpeedCurve(0.0, seconds), 0.5, 0.0, 0.0)


def test_measurements_stay_with_their_devices() -> None:
    exchange = Exchange(((1.0, 7),))
    old = DeviceEstimates.measured(SPECS[:2], [curve(1), curve(2)], exchange)
    new = DeviceEstimates((curve(8), curve(9)), (CATALOGUE, CATALOGUE), SPECS[1:], Exchange())
    mixed = new.mixed([1, None], old)
    assert mixed.devices == (curve(2), curve(9))
    assert mixed.sources == (MEASURED, CATALOGUE)
    assert mixed.exchange == exchange
    assert mixed.linked == new.linked
    assert new.mixed([None, None], old) == new


def test_what_the_catalogue_said_of_the_old_devices_is_said_anew() -> None:
    old = DeviceEstimates((curve(1), None), (CATALOGUE, NOTHING), SPECS[:2], Exchange(((1.0, 7),)))
    new = DeviceEstimates((curve(3), None), (CATALOGUE, NOTHING), SPECS[:2], Exchange())
    assert new.mixed([0, 1], old) == new
    assert not new.complete


def test_caps_are_further_limits() -> None:
    known = DeviceEstimates((curve(1).capped(9), None, curve(2)), (CATALOGUE,) * 3, SPECS, Exchange())
    limited = known.limited([12, 5, None], [None, None, 4]).devices
    assert [one.curve.cap if one is not None else None for one in limited] == [9, None, None]
    assert [one.curve.microbatch_size if one is not None else None for one in limited] == [None, None, 4]
