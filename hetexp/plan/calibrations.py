"""Keeps the measurements of devices in `$HETEXP_HOME/calibrations`, so that a job is measured only once.

There is a file for each job, and one for each device alone. The name of a file is a hash of the facts on
which the measured times depend. The file has these facts as well, to be readable.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import hetexp
from hetexp.core.config import Config
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.device import DeviceSpec
from hetexp.core.files import write_json
from hetexp.core.plan import Plan
from hetexp.hardware.backend import backend_class
from hetexp.hardware.detection.builds import home
from hetexp.plan.sources import source_hashes

log = logging.getLogger(__name__)

FORMAT = 2
MOST_DAYS = 30
"""Age at which devices are measured again, because of slow changes that are in no key (dust, firmware)."""
WRONG_BY = 0.1
"""Largest relative difference between the predicted and the measured step that keeps a calibration."""
LINKS_GBIT = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 100.0, 200.0, 400.0)
"""Rates of links between hosts: those of Ethernet, and of radio below."""
LEAST_WINDOWS, LEAST_STEPS = 3, 30
"""Log lines and steps after the first line from which a run's step time is judged."""


@dataclass(frozen=True)
class Cached:
    """The kept measurement of a job's devices."""

    devices: tuple[DeviceCalibration, ...]
    exchange: Exchange
    measured_at: str
    """ISO 8601, UTC."""
    time_scale: float | None = None
    """The pace of emulated devices at that time."""

    def reason(self) -> str:
        """Return the sentence for the plan."""
        local = datetime.fromisoformat(self.measured_at).astimezone()
        return (
            f"The devices were measured at {local:%Y-%m-%d %H:%M} for the same job; "
            "balancing.recalibrate=true measures them again."
        )


def find(plan: Plan, config: Config) -> Cached | None:
    """Return the kept measurement of this job with all its devices; `None` if there is none."""
    if not _keeps(plan, config):
        return None
    *_, (name, facts) = _entries(plan, config)
    entry = _read(name, facts)
    if entry is None:
        return None
    measured = entry["calibration"]
    return Cached(*_measured(measured), entry["measured_at"], measured.get("time_scale"))


def known_devices(plan: Plan, config: Config) -> list[DeviceCalibration | None]:
    """Return the kept measurement of each of the plan's devices alone, maybe from a run with other devices.

    The global batch may have been another one. A curve is certain only between its measured sizes
    (`DeviceCalibration.points`).
    """
    if not _keeps(plan, config):
        return [None] * plan.world_size
    *of_devices, _ = _entries(plan, config)
    entries = (_read(name, facts) for name, facts in of_devices)
    return [
        DeviceCalibration.from_dict(entry["calibration"]) if entry is not None else None for entry in entries
    ]


def store(plan: Plan, config: Config, measured: Mapping[str, Any]) -> str:
    """Keep a measurement, and return its time (now; ISO 8601, UTC).

    A failure to write does not end the run: the log has a warning.

    Args:
        measured: plain types of all `devices` of the plan, in its order, and of their `exchange`.
    """
    measured_at = datetime.now(timezone.utc).isoformat()
    if not _keeps(plan, config):
        return measured_at
    entries = _entries(plan, config)
    try:
        folder().mkdir(parents=True, exist_ok=True)
        _remove_old()
        for (name, facts), calibration in zip(entries, [*measured["devices"], measured], strict=True):
            entry = {"format": FORMAT, "measured_at": measured_at, "facts": facts, "calibration": calibration}
            write_json(folder() / name, entry)
    except OSError as error:
        log.warning("what was measured could not be kept in %s: %s", folder(), error.strerror or error)
    return measured_at


def keep_choice(plan: Plan, config: Config, ranks: Sequence[int]) -> None:
    """Keep which of the plan's devices train, so that later runs of the job choose the same ones.

    `drop_if_wrong` does not delete it: a split follows the measurements, but who takes part does not change
    with each of them.
    """
    if not _keeps(plan, config):
        return
    name, facts = _choice_entry(plan, config)
    try:
        folder().mkdir(parents=True, exist_ok=True)
        write_json(folder() / name, {"format": FORMAT, "facts": facts, "ranks": list(ranks)})
    except OSError as error:
        log.warning("which devices train could not be kept in %s: %s", folder(), error.strerror or error)


def earlier_choice(plan: Plan, config: Config) -> tuple[int, ...] | None:
    """Return the ranks of the devices that trained in an earlier run of this job; `None` without one."""
    if not _keeps(plan, config):
        return None
    name, facts = _choice_entry(plan, config)
    try:
        entry = json.loads((folder() / name).read_text(encoding="utf-8"))
        ranks = tuple(int(rank) for rank in entry["ranks"])
        same = entry["format"] == FORMAT and entry["facts"] == json.loads(json.dumps(facts))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return ranks if same and ranks and max(ranks) < plan.world_size else None


def _choice_entry(plan: Plan, config: Config) -> tuple[str, dict[str, Any]]:
    *_, (name, facts) = _entries(plan, config)
    return name.replace("job-", "choice-"), facts


def names(plan: Plan, config: Config) -> list[str]:
    """Return the names of the entries that this plan reads and writes; empty if it keeps nothing."""
    if not _keeps(plan, config):
        return []
    return [name for name, _ in _entries(plan, config)]


def drop_if_wrong(plan: Plan, summary: Mapping[str, Any]) -> str | None:
    """Delete the entries of a completed run's split if its steps were longer or shorter than predicted.

    The next run then measures again. Short runs, runs with faults and runs without valid times do not count.

    Returns:
        A sentence about it; `None` if the entries stay.
    """
    entries = (plan.calibration or {}).get("entries")
    if not entries or plan.config.get("fault", {}).get("events") or summary["valid"] is False:
        return None
    measured = _steady_step_seconds(Path(plan.run_dir), plan.config["trainer"]["global_batch_size"])
    predicted = summary["predicted_step_s"]
    if predicted is None or measured is None or abs(measured / predicted - 1) <= WRONG_BY:
        return None
    for name in entries:
        (folder() / name).unlink(missing_ok=True)
    return (
        f"A step took {measured:.4g} s and was predicted to take {predicted:.4g} s: the kept calibration is "
        "dropped, and the next run measures again."
    )


def folder() -> Path:
    """Return the folder of all entries."""
    return home() / "calibrations"


def _keeps(plan: Plan, config: Config) -> bool:
    """Return whether measurements are kept; those of a shared card hold only for a moment."""
    on_cards = any(not backend_class(device.backend).computes_on_cpu for device in plan.devices)
    return not (config.hardware.share_devices and on_cards)


def _entries(plan: Plan, config: Config) -> list[tuple[str, dict[str, Any]]]:
    """Return name and facts of each device's entry, and at the end those of the job's entry."""
    work = _work_facts(plan, config)  # reads the sources of the user's own classes
    devices = [_device_facts(plan, config, rank) | work for rank in range(plan.world_size)]
    entries = [(f"device-{_hash(facts)}.json", facts) for facts in devices]
    return [*entries, _job_entry(plan, config, [name for name, _ in entries])]


def _job_entry(plan: Plan, config: Config, devices: list[str]) -> tuple[str, dict[str, Any]]:
    """Return name and facts of this job's entry: the devices in their order, and their exchange.

    Args:
        devices: names of their entries.
    """
    trainer = config.trainer
    facts = {
        "devices": devices,
        "global_batch_size": trainer.global_batch_size,  # decides the measured sizes and the loading time
        "clip_norm": trainer.clip_norm,
        "non_finite": trainer.non_finite,
        "route": asdict(plan.way),
        "wire": plan.wire,
        "variables": config.comm.env,
        "network": _network(plan),
        "hosts": [device.host for device in plan.devices],
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "GLOO_"))},
    }
    return f"job-{_hash(facts)}.json", facts


def _network(plan: Plan) -> dict[str, Any] | str | None:
    """Return the network between hosts; of a measured network only the kind of link."""
    if plan.network is None or any(device.backend == "emulated" for device in plan.devices):
        return plan.network
    gbit = plan.network["gb_per_second"] * 8
    # A measured rate is at most the link's, and differs a little each time.
    return next((f"{link:g} Gbit/s" for link in LINKS_GBIT if gbit <= link), "more")


def _work_facts(plan: Plan, config: Config) -> dict[str, Any]:
    """Return the facts on which the work of a pass depends on any device, without the global batch."""
    trainer = config.trainer
    sections = {key: getattr(config, key) for key in ("model", "data", "optimizer", "strategy")}
    return {
        **sections,
        "loss": trainer.loss,
        "loss arguments": config.loss.arguments(),
        "accumulate": trainer.accumulate,
        "microbatch_size": trainer.microbatch_size,
        "activation_checkpointing": trainer.activation_checkpointing,
        "compile": trainer.compile,
        "channels_last": trainer.channels_last,
        "detect_anomaly": config.debug.detect_anomaly,
        "hetexp": hetexp.__version__,
        "sources": source_hashes([*sections.values(), trainer.loss], plan.import_paths),
        # Ranks on the CPU take cores from each other and from the data loaders of the cards.
        "cpu_ranks": sum(backend_class(device.backend).computes_on_cpu for device in plan.devices),
    }


def _device_facts(plan: Plan, config: Config, rank: int) -> dict[str, Any]:
    device = plan.devices[rank]
    return {
        "device": _identity(device, config),
        "slow": device.slow,
        "memory_bytes": device.memory_bytes,
        "power_limit_watts": device.power_limit_watts,
        "driver": device.driver,
        "precision": plan.precisions[rank] if plan.precisions else None,
        "threads": plan.threads[rank],
        "torch": device.torch,
        "python": device.python or platform.python_version(),
    }


def _identity(device: DeviceSpec, config: Config) -> dict[str, Any]:
    """Return the facts that identify a device. All ranks on a CPU are equal."""
    if device.backend == "emulated":
        seed = config.hardware.deviation_seed
        return {
            "emulated": device.card_facts,
            "deviation": [seed, device.index] if seed is not None else None,
            "time_scale": config.hardware.time_scale,
        }
    if device.uuid is not None:
        return {"uuid": device.uuid}
    return {"machine": platform.node(), "backend": device.backend, "name": device.name, "pci": device.pci}


def _hash(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def _read(name: str, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an entry; `None` if it is missing, damaged (with a warning in the log) or too old."""
    path = folder() / name
    try:
        entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if entry["format"] != FORMAT or entry["facts"] != json.loads(json.dumps(facts)):
            raise ValueError("it is of another version")
        age = datetime.now(timezone.utc) - datetime.fromisoformat(entry["measured_at"])
        read = _measured if name.startswith("job") else DeviceCalibration.from_dict
        read(entry["calibration"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is not used, and the devices are measured again: %s", path, error)
        return None
    return entry if age < timedelta(days=MOST_DAYS) else None


def _measured(raw: Mapping[str, Any]) -> tuple[tuple[DeviceCalibration, ...], Exchange]:
    """Return devices and exchange from a measurement's plain types."""
    return tuple(map(DeviceCalibration.from_dict, raw["devices"])), Exchange.from_dict(raw["exchange"])


def _steady_step_seconds(run_dir: Path, full_batch: int) -> float | None:
    """Return the measured seconds of a full batch's step: the median of a run's log windows but the first.

    In the first window kernels are chosen and caches fill. The last batch of an epoch may be smaller.
    """
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if "samples_per_second" in row]
    except (OSError, ValueError):
        return None
    if len(rows) <= LEAST_WINDOWS or rows[-1]["step"] - rows[0]["step"] < LEAST_STEPS:
        return None
    return full_batch / float(statistics.median(row["samples_per_second"] for row in rows[1:]))


def _remove_old() -> None:
    """Remove outdated entries, and temporary files of killed writers."""
    limit = time.time() - MOST_DAYS * 24 * 3600
    for path in folder().iterdir():
        try:
            if path.stat().st_mtime < limit:
                path.unlink()
        except FileNotFoundError:  # another run was quicker
            continue
