"""What was measured is found again for the same job, and for no other."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from support import plan_on, unbuilt_config

import hetexp
from hetexp.core.config import Config, read_config
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.topology import Topology
from hetexp.hardware.catalogue import load_catalogue
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.plan import calibrations
from hetexp.plan.calibrated_plan import calibrated_plan, choose
from hetexp.plan.calibrations import (
    Cached,
    drop_if_wrong,
    earlier_choice,
    find,
    folder,
    keep_choice,
    known_devices,
    names,
    store,
)

NVIDIA = DeviceSpec("cuda:0", "cuda", 0, "Card", "nvidia", 8 * 2**30, uuid="GPU-1", driver="550", torch="2.9")
INTEL = DeviceSpec("xpu:0", "xpu", 0, "Arc", "intel", 8 * 2**30, uuid="GPU-2", driver="1.3", torch="2.9")
FAST = DeviceCalibration(SpeedCurve(0.01, 0.001), 0.6, 0.02, 0.01, ((8, 0.018), (64, 0.074)))
SLOW = DeviceCalibration(SpeedCurve(0.01, 0.003), 0.5, 0.02, 0.01, ((4, 0.022), (64, 0.202)))
EXCHANGE = Exchange(((1.0, 100),), Channel(1e-4, 1e9), 0.001, 0.002)


def job(*devices: DeviceSpec, **sections: Any) -> tuple[Plan, Config]:
    """A plan of these devices (NVIDIA beside Intel by default) and its configuration."""
    chosen = devices or (NVIDIA, INTEL)
    raw = unbuilt_config(trainer={"global_batch_size": 64, **sections.pop("trainer", {})}, **sections)
    plan = plan_on(chosen, raw, collective_backend="gloo")
    return plan, read_config(raw)


def measured(*devices: DeviceCalibration, exchange: Exchange = EXCHANGE) -> dict[str, Any]:
    return {
        "devices": [one.to_dict() for one in devices or (FAST, SLOW)],
        "exchange": exchange.to_dict(),
    }


def test_the_same_job_finds_what_was_measured() -> None:
    assert find(*job()) is None
    assert known_devices(*job()) == [None, None]
    at = store(*job(), measured())
    assert find(*job()) == Cached((FAST, SLOW), EXCHANGE, at)
    assert known_devices(*job()) == [FAST, SLOW]
    assert sorted(path.name for path in folder().iterdir()) == sorted(names(*job()))
    assert abs(datetime.now(timezone.utc) - datetime.fromisoformat(at)) < timedelta(minutes=5)
    assert "balancing.recalibrate=true" in Cached((FAST, SLOW), EXCHANGE, at).reason()


def another(**changes: Any) -> tuple[Plan, Config]:
    return job(replace(NVIDIA, **changes), INTEL)


OTHERS: dict[str, Callable[[], tuple[Plan, Config]]] = {
    "another card": lambda: another(uuid="GPU-3"),
    "another driver": lambda: another(driver="560"),
    "another torch": lambda: another(torch="2.10"),
    "another interpreter": lambda: another(python="/opt/other/bin/python"),
    "slowed": lambda: another(slow=2.0),
    "less memory": lambda: another(memory_bytes=4 * 2**30),
    "another power limit": lambda: another(power_limit_watts=150.0),
    "another model": lambda: job(model={"_target_": "unused", "hidden": 8}),
    "other data": lambda: job(data={"_target_": "unused", "width": 8}),
    "another optimizer": lambda: job(optimizer={"_target_": "unused", "lr": 0.1}),
    "another strategy": lambda: job(strategy={"_target_": "unused"}),
    "another loss": lambda: job(trainer={"loss": "mse"}),
    "accumulation": lambda: job(trainer={"accumulate": 2}),
    "microbatches": lambda: job(trainer={"microbatch_size": 8}),
    "anomalies looked for": lambda: job(debug={"detect_anomaly": True}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_changes_a_device_s_speed_is_measured_anew(what: str) -> None:
    store(*job(), measured())
    other = OTHERS[what]()
    assert find(*other) is None
    assert known_devices(*other)[0] is None


def test_precision_threads_and_hetexp_count(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, config = job()
    store(plan, config, measured())
    assert known_devices(replace(plan, precisions=("bfloat16", "float32")), config) == [None, SLOW]
    assert known_devices(replace(plan, threads=(1, 2)), config) == [FAST, None]
    monkeypatch.setattr(hetexp, "__version__", "99")
    assert known_devices(plan, config) == [None, None]


def test_what_does_not_change_it_does_not_count() -> None:
    store(*job(), measured())
    plan, config = job(trainer={"max_steps": 99, "seed": 3, "log_every": 1, "eval_every": 5})
    moved = replace(plan, devices=(replace(NVIDIA, id="cuda:1", index=1, number=4), INTEL), run_id="other")
    assert find(moved, config) is not None


def test_an_edited_model_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "hx_model.py"
    path.write_text("class Net: ...\n")
    plan, config = job(model={"_target_": "hx_model.Net"})
    plan = replace(plan, import_paths=(str(tmp_path),))
    store(plan, config, measured())
    assert find(plan, config) is not None
    path.write_text("class Net:\n    deeper = True\n")
    assert find(plan, config) is None


def test_the_exchange_is_that_of_these_devices_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, config = job()
    store(plan, config, measured())
    assert find(*job(INTEL, NVIDIA)) is None
    assert known_devices(*job(INTEL, NVIDIA)) == [SLOW, FAST]
    assert find(replace(plan, collective_backend="nccl"), config) is None
    assert find(replace(plan, route=Topology.flat("shm", plan.world_size)), config) is None
    coded = {**plan.config, "comm": {"wire": "int8"}}
    assert find(replace(plan, config=coded), config) is None
    assert find(replace(plan, network={"gb_per_second": 1}), config) is None
    assert find(*job(trainer={"clip_norm": 1.0})) is None
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert find(plan, config) is None
    assert known_devices(plan, config) == [FAST, SLOW]


def test_a_network_that_measures_a_little_otherwise_is_the_same_kind_of_link() -> None:
    plan, config = job()
    store(replace(plan, network={"gb_per_second": 0.119}), config, measured())
    assert find(replace(plan, network={"gb_per_second": 0.094}), config) is not None
    for other in (0.012, 0.3, 1000.0):
        assert find(replace(plan, network={"gb_per_second": other}), config) is None


def test_another_batch_is_measured_and_a_device_alone_is_known() -> None:
    store(*job(), measured())
    larger = job(trainer={"global_batch_size": 256})
    assert find(*larger) is None
    assert known_devices(*larger) == [FAST, SLOW]


def test_batches_do_not_drive_each_other_out() -> None:
    small = job(trainer={"global_batch_size": 8})
    store(*job(), measured())
    store(*small, measured(SLOW, SLOW))
    store(*job(NVIDIA, replace(INTEL, uuid="GPU-9")), measured(SLOW, SLOW))
    kept = find(*job())
    assert kept is not None and kept.devices == (FAST, SLOW)
    assert known_devices(*job()) == [SLOW, SLOW]  # the newest of each device


def test_equal_ranks_on_the_cpu_are_one_device() -> None:
    cpu = DeviceSpec("cpu:0", "cpu", 0, "Some CPU", "cpu")
    two = job(cpu, replace(cpu, id="cpu:1", index=1))
    store(*two, measured(FAST, FAST))
    assert known_devices(*two) == [FAST, FAST]
    # One more takes cores from them.
    three = job(cpu, replace(cpu, id="cpu:1", index=1), replace(cpu, id="cpu:2", index=2))
    assert known_devices(*three) == [None] * 3


def test_an_emulated_card_is_its_figures_and_its_hidden_deviation() -> None:
    cards = load_catalogue(None)
    known = {name: cards.card(name, "a test") for name in ("rtx_3090", "arc_a770")}
    first, second = (EmulatedBackend.describe_card(0, card) for card in known.values())
    store(*job(first, second), measured())
    assert find(*job(replace(first, index=5, id="emulated:5"), second)) is not None
    slower = known["rtx_3090"].model_copy(update={"efficiency": 0.01})
    assert known_devices(*job(EmulatedBackend.describe_card(0, slower), second)) == [None, SLOW]
    hardware = {"devices": ["cpu"], "deviation_seed": 3}
    deviating = job(first, replace(second, index=1), hardware=hardware)
    assert find(*deviating) is None
    store(*deviating, measured())
    assert known_devices(*job(second, replace(first, index=1), hardware=hardware)) == [None, None]
    assert known_devices(*job(first, second, hardware={"devices": ["cpu"], "time_scale": 2.0})) == [
        None,
        None,
    ]


def test_times_of_a_card_that_others_use_are_not_kept() -> None:
    plan, config = job(hardware={"devices": ["cpu"], "share_devices": True})
    store(plan, config, measured())
    assert not folder().exists() and names(plan, config) == []
    assert find(plan, config) is None and known_devices(plan, config) == [None, None]


def spoil(change: Callable[[dict[str, Any]], Any]) -> None:
    for path in folder().iterdir():
        path.write_text(json.dumps(change(json.loads(path.read_text()))))


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an old format": lambda entry: entry | {"format": 0},
    "no calibration": lambda entry: entry | {"calibration": None},
    "an empty one": lambda entry: entry | {"calibration": {}},
    "wrong values": lambda entry: entry | {"calibration": dict.fromkeys(entry["calibration"], "x")},
    "no date": lambda entry: entry | {"measured_at": 3},
    "other facts": lambda entry: entry | {"facts": {}},
    "a list": lambda entry: [entry],
    "a date without zone": lambda entry: entry | {"measured_at": "2026-01-01T00:00:00"},
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_entry_is_told_and_not_used(what: str, caplog: pytest.LogCaptureFixture) -> None:
    store(*job(), measured())
    spoil(DAMAGE[what])
    assert find(*job()) is None
    assert known_devices(*job()) == [None, None]
    assert "measured again" in caplog.text
    store(*job(), measured())
    assert find(*job()) is not None


@pytest.mark.parametrize("text", ["", "{", '{"format": 1', "\x00\xff"])
def test_half_a_file_is_none(text: str, caplog: pytest.LogCaptureFixture) -> None:
    store(*job(), measured())
    for path in folder().iterdir():
        path.write_bytes(text.encode("latin-1"))
    assert find(*job()) is None
    assert "measured again" in caplog.text


def test_old_entries_are_not_used_and_removed() -> None:
    store(*job(), measured())
    old = datetime.now(timezone.utc) - timedelta(days=calibrations.MOST_DAYS + 1)
    spoil(lambda entry: entry | {"measured_at": old.isoformat()})
    assert find(*job()) is None
    for path in folder().iterdir():
        os.utime(path, (old.timestamp(), old.timestamp()))
    other = job(model={"_target_": "unused", "hidden": 8})
    store(*other, measured())
    assert sorted(path.name for path in folder().iterdir()) == sorted(names(*other))


def test_a_run_does_not_fail_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path / "file"))
    store(*job(), measured())
    assert "could not be kept" in caplog.text
    assert find(*job()) is None


def _write_often(start: Any) -> None:
    start.wait()
    for _ in range(20):
        store(*job(), measured())


def test_who_trained_is_known_to_later_runs_of_the_job_also_if_the_measurement_is_dropped() -> None:
    plan, config = job()
    assert earlier_choice(plan, config) is None
    store(plan, config, measured())
    keep_choice(plan, config, (1,))
    for name in names(plan, config):
        (folder() / name).unlink()
    assert find(plan, config) is None
    assert earlier_choice(plan, config) == (1,)
    assert earlier_choice(*job(trainer={"global_batch_size": 128})) is None
    assert earlier_choice(*job(INTEL, NVIDIA)) is None


@pytest.mark.parametrize("text", ["{", "{}", '{"format": 2, "facts": {}, "ranks": [0]}'])
def test_a_damaged_choice_is_none(text: str) -> None:
    plan, config = job()
    keep_choice(plan, config, (0, 1))
    (path,) = folder().glob("choice-*.json")
    path.write_text(text)
    assert earlier_choice(plan, config) is None


def test_runs_that_write_at_once_leave_whole_entries() -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    writers = [context.Process(target=_write_often, args=(start,)) for _ in range(3)]
    store(*job(), measured())
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert find(*job()) is not None
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert sorted(path.name for path in folder().iterdir()) == sorted(names(*job()))


@pytest.mark.parametrize(("total", "ranks"), [(64, (0, 1)), (8, (0,))])
def test_the_choice_is_made_anew_whatever_is_known(total: int, ranks: tuple[int, ...]) -> None:
    """A small batch is quicker without the second device; both batches were measured before."""
    plan, config = job(trainer={"global_batch_size": total})
    fixed = replace(SLOW, curve=replace(SLOW.curve, update_seconds=0.02))
    store(plan, config, measured(FAST, fixed))
    cached = find(plan, config)
    assert cached is not None
    assert choose(plan, cached.devices, cached.exchange).ranks == ranks
    capped = [cached.devices[0].capped(10), cached.devices[1].capped(None)]  # the memory of today
    assert choose(plan, capped, cached.exchange).split.counts[0] <= 10


def finished(tmp_path: Path, step_seconds: float, first: float = 5.0, **changes: Any) -> str | None:
    """A run of 50 steps, predicted to take 0.1 s each."""
    plan, config = job(**changes)
    at = store(plan, config, measured())
    source = {"measured_at": at, "cached": True, "entries": names(plan, config)}
    choice = choose(plan, [FAST, SLOW], EXCHANGE)
    plan = calibrated_plan(
        replace(plan, run_dir=str(tmp_path)), [FAST, SLOW], EXCHANGE.to_dict(), choice, source
    )
    total = config.trainer.global_batch_size
    rows = [{"step": 10, "samples_per_second": total / first}, {"step": 10, "eval/loss": 1.0}]
    rows += [{"step": 10 * n, "samples_per_second": total / step_seconds} for n in range(2, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return drop_if_wrong(plan, {"valid": True, "predicted_step_s": 0.1})


@pytest.mark.parametrize(
    ("step_seconds", "dropped"), [(0.1, False), (0.109, False), (0.12, True), (0.08, True)]
)
def test_a_run_that_took_otherwise_drops_what_is_known(
    tmp_path: Path, step_seconds: float, dropped: bool
) -> None:
    told = finished(tmp_path, step_seconds)
    assert (told is not None) == dropped
    assert (find(*job()) is None) == dropped
    if told:
        assert "was predicted to take 0.1 s" in told and "next run measures again" in told


def test_a_run_that_tells_nothing_drops_nothing(tmp_path: Path) -> None:
    slowed = {"events": [{"kind": "slow", "device": "cuda:0", "at_step": 5}]}
    assert finished(tmp_path, 0.3, fault=slowed) is None
    plan, config = job()
    known = replace(plan, run_dir=str(tmp_path), calibration={"entries": names(plan, config)})
    assert drop_if_wrong(known, {"valid": False, "predicted_step_s": 0.1}) is None
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "samples_per_second": 9}\n{"step": 2, "samples_per_second": 9}\n'
    )
    assert drop_if_wrong(known, {"valid": True, "predicted_step_s": 0.1}) is None
    (tmp_path / "metrics.jsonl").unlink()
    assert drop_if_wrong(known, {"valid": True, "predicted_step_s": 0.1}) is None
    assert drop_if_wrong(plan, {"valid": True, "predicted_step_s": 0.1}) is None
