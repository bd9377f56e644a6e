"""The devices' profiles, as calibrations measured them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hetexp.core.cost.calibration import DeviceCalibration
from hetexp.core.device import DeviceSpec
from hetexp.core.files import read_json
from hetexp.core.plan import Plan
from hetexp.report.results import DeviceProfile
from hetexp.report.runs import CALIBRATION, PLAN, RunRecord


def profiles_of(runs: Sequence[RunRecord]) -> tuple[DeviceProfile, ...]:
    """Return the profiles of the calibration with the most devices; of equal ones, the first run's.

    A run that calibrated itself has profiles of all its devices, those left out included. A run that took an
    earlier run's calibration has profiles of the participating devices only.

    Args:
        runs: the most important first.
    """
    measurements = [(plan, devices, run) for run in runs for plan, devices in _calibrations(run)]
    if not measurements:
        return ()
    plan, measured, run = max(measurements, key=lambda calibration: len(calibration[1]))
    devices = [(spec, DeviceCalibration.from_dict(calibration)) for spec, calibration in measured]
    total = int(plan.config["trainer"]["global_batch_size"])
    speeds = [total / calibration.curve.seconds(total) for _, calibration in devices]
    return tuple(
        DeviceProfile(
            device=f"{spec.id} · {spec.name}",
            emulated=spec.emulated,
            samples=tuple(samples for samples, _ in sorted(calibration.points)),
            seconds=tuple(seconds for _, seconds in sorted(calibration.points)),
            fixed_seconds=calibration.curve.fixed_seconds,
            seconds_per_sample=calibration.curve.seconds_per_sample,
            relative_speed=speed / max(speeds),
            samples_per_second=speed,
            fault=fault_of(run, spec.id),
        )
        for (spec, calibration), speed in zip(devices, speeds, strict=True)
    )


def fault_of(run: RunRecord, device: str) -> str | None:
    """Return the faults that were ordered for a device of a run."""
    events = run.configured.get("fault.events") or []
    texts = [_event(event) for event in events if event.get("device") == device]
    return ", ".join(texts) or None


def _event(event: dict[str, Any]) -> str:
    kind = str(event["kind"])
    much = f" {float(event['factor']):g}×" if kind in ("slow", "thermal", "jitter") else ""
    at, until = event.get("at_step"), event.get("until_step")
    since = f" from step {at}" if at is not None else f" from second {event.get('at_seconds')}"
    return f"{kind}{much}{since}{f' to {until}' if until is not None else ''}"


Measured = tuple[Plan, list[tuple[DeviceSpec, dict[str, Any]]]]


def _calibrations(run: RunRecord) -> Iterator[Measured]:
    """Yield the calibrations of a run's own folder and of its plan."""
    folder = run.folder / CALIBRATION
    try:
        measured = read_json(folder / f"{CALIBRATION}.json")
        plan = Plan.read_checked(folder / PLAN)
        yield plan, list(zip(plan.devices, measured["devices"], strict=True))
    except (OSError, ValueError, KeyError, TypeError):  # the calibration is absent or incomplete
        pass
    if run.plan is not None and run.plan.calibration is not None:
        yield run.plan, list(zip(run.plan.devices, run.plan.calibration["devices"], strict=False))
