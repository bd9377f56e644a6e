"""Run folders, read for a comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hetexp.core.errors import ConfigError, must_be, plain_line
from hetexp.core.files import read_json
from hetexp.core.lines import all_rows
from hetexp.core.plan import Plan
from hetexp.core.section import flatten
from hetexp.core.summary import summary_problem
from hetexp.core.sweep.folder import SWEEP_FILE, SweepRow, key_of, of_a_run, read_rows

SUMMARY, PLAN, METRICS = "summary.json", "plan.json", "metrics.jsonl"
HYDRA = Path(".hydra", "overrides.yaml")
"""Hydra writes this file before hetexp checks the configuration."""
PREDICTION, CALIBRATION = "prediction.json", "calibration"
"""A file that marks a prediction without a run, and a run's subfolder."""
TRACEBACK = "error.txt"
"""File that a sweep (`hetexp.launch.sweep.run`) writes into the folder of a failed run."""
NO_RUNS = "a folder with runs in it (each has a plan.json)"


@dataclass(frozen=True)
class RunRecord:
    """One run, read from its folder."""

    folder: Path
    summary: dict[str, Any]
    """`summary.json`; only `status` and `error` if the run never started or was killed."""
    plan: Plan | None
    """`None` if the run's configuration was refused."""
    overrides: tuple[str, ...] = ()
    """Overrides that the user typed, or the sweep chose."""
    row: SweepRow | None = None
    """The run's row in its sweep."""

    @property
    def status(self) -> str:
        """`completed`, `failed`, `interrupted`, `refused`, or `unfinished` if its end is unknown."""
        return str(self.summary["status"])

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    @property
    def scale(self) -> float:
        """Wall-clock seconds of one modelled second; 1 if no device is paced."""
        return float(self.summary.get("time_scale") or 1.0)

    @property
    def seed(self) -> int | None:
        """Seed of the run; of a refused run, the typed seed."""
        if "seed" in self.summary or self.plan is None:
            value = self.summary.get("seed", self.settings.get("trainer.seed"))
        else:
            value = self.plan.config.get("trainer", {}).get("seed")
        return int(value) if value is not None and str(value).lstrip("-").isdigit() else None

    @property
    def emulated(self) -> bool:
        """Whether a device is emulated or altered: such runs are compared only with each other."""
        return bool(self.summary.get("emulated", self.plan is not None and self.plan.emulated))

    @property
    def valid(self) -> bool:
        """False if this machine was too slow for the emulated devices, so that the run's times are wrong."""
        return self.summary.get("valid") is not False

    @property
    def exact(self) -> bool:
        """Whether its steps are those of one device; true if the summary does not say."""
        return self.summary.get("exact") is not False

    @property
    def fallback(self) -> dict[str, str] | None:
        """Requested strategy, strategy that ran instead, and reason; `None` without a real fallback."""
        swap = self.summary.get("fallback") or (self.plan.fallback if self.plan is not None else None)
        return swap if swap is not None and swap["from"] != swap["to"] else None

    @property
    def device_names(self) -> tuple[str, ...]:
        """Names of the participating devices, in rank order."""
        return tuple(str(device["name"]) for device in self.summary.get("devices", ()))

    @property
    def own_steps(self) -> int | None:
        """Steps of this run itself, without those before a resume; its throughput is of these."""
        counts = [device.get("steps") for device in self.summary.get("devices", ())]
        return next((int(steps) for steps in counts if steps is not None), self.summary.get("steps"))

    @property
    def first_step(self) -> int:
        """Steps before the first line of the metrics: 0 unless the run was resumed."""
        steps, done = self.summary.get("steps"), self.own_steps
        if steps is None or done is None or done >= steps:
            return 0
        begun = steps - done
        logged = next((int(line["step"]) for line in self.metrics if "step_seconds" in line), steps)
        return int(begun) if logged > begun else 0  # else the folder has the lines before the resume, too

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The numbers in `metrics.jsonl`, by line; if a resumed run repeated a step, its later lines."""
        return _metrics(all_rows(self.folder / METRICS))

    @cached_property
    def settings(self) -> dict[str, str]:
        """Each group's requested option, the hardware's first, and each typed key."""
        chosen = {} if self.plan is None else dict(reversed(self.plan.choices.items()))
        if self.plan is not None and self.plan.script is not None:
            chosen["script"] = Path(self.plan.script).name
        fallback = self.fallback
        if fallback is not None and "strategy" in chosen:
            chosen["strategy"] = fallback["from"]
        for text in self.overrides:
            key, _, value = text.lstrip("+").partition("=")
            key = key.partition("@")[0]
            if not text.startswith("~"):
                chosen[key] = canonical(value)
        return chosen

    @cached_property
    def configured(self) -> dict[str, Any]:
        """The resolved configuration with dotted keys."""
        return {} if self.plan is None else flatten(self.plan.config)

    def setting(self, key: str) -> str | None:
        """Return a key's value, typed or not; `None` if it is unknown or absent."""
        if key in self.settings:
            return self.settings[key]
        return canonical(self.configured[key]) if key in self.configured else None


def read_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """Return all runs in these folders and below them, a sweep's runs in the order of its jobs.

    If a run of a sweep was attempted several times, only the newest attempt is returned.

    Raises:
        ConfigError: a path is no folder, or no folder has a run.
    """
    paths = list(paths)
    problems = [must_be("FOLDER", "a run folder or one above it", str(p)) for p in paths if not p.is_dir()]
    if problems:
        raise ConfigError(problems)
    runs: dict[Path, RunRecord] = {}
    for path in paths:
        for run in _below(path.resolve()):
            runs.setdefault(run.folder, run)
    if not runs:
        raise ConfigError(must_be("FOLDER", NO_RUNS, ", ".join(map(str, paths))))
    return list(runs.values())


def _below(path: Path) -> Iterator[RunRecord]:
    rows = read_rows(path)
    if rows or (path / SWEEP_FILE).exists():
        yield from _of_sweep(path, rows)
    elif (path / PLAN).exists():
        yield _read(path)
    elif (path / HYDRA).exists():
        if not (path / PREDICTION).exists():
            yield _unstarted(path)
    else:
        for child in _folders(path):
            yield from _below(child)


def _folders(path: Path) -> list[Path]:
    """Return the subfolders by name, numbers by value, without links, which may be circular."""
    children = [c for c in path.iterdir() if not c.name.startswith(".") and c.is_dir() and not c.is_symlink()]
    return sorted(children, key=lambda c: (not c.name.isdigit(), int(c.name) if c.name.isdigit() else c.name))


def _of_sweep(sweep: Path, rows: Sequence[SweepRow]) -> Iterator[RunRecord]:
    """Yield the runs with a row, and then the runs that have no row yet."""
    ended, keys = {sweep / row.folder for row in rows}, {row.overrides for row in rows}
    for row in rows:
        folder = sweep / row.folder
        if (folder / PLAN).exists():
            yield _read(folder, row)
        else:
            yield RunRecord(folder, {"status": row.status, "error": row.error}, None, row.overrides, row)
    for child in _folders(sweep):
        if child not in ended:
            yield from (run for run in _below(child) if key_of(run.overrides) not in keys)


def _read(folder: Path, row: SweepRow | None = None) -> RunRecord:
    """Return a run that has a plan; if its files cannot be read, its error says why."""
    try:
        plan = Plan.read_checked(folder / PLAN)
        path = folder / SUMMARY
        if path.exists():
            summary = read_json(path)
            if problem := summary_problem(summary):
                raise ValueError(f"{SUMMARY}: {problem}")
        else:
            summary = {"status": "unfinished", "error": "it has no summary: it is running, or was killed"}
    except (OSError, ValueError) as error:
        reason = f"its files cannot be read ({type(error).__name__}: {plain_line(error)})"
        overrides = row.overrides if row is not None else _typed(folder)
        return RunRecord(folder, {"status": "unfinished", "error": reason}, None, overrides, row)
    return RunRecord(folder, summary, plan, plan.overrides if row is None else row.overrides, row)


def _unstarted(folder: Path) -> RunRecord:
    """Return a run that Hydra started and that has no plan."""
    reason = (
        "it still measures its devices, or ended there"
        if (folder / CALIBRATION).is_dir()
        else "it has no plan: its configuration was refused, or it was stopped before it started"
    )
    return RunRecord(folder, {"status": "unfinished", "error": reason}, None, _typed(folder))


def _typed(folder: Path) -> tuple[str, ...]:
    """Return the overrides that Hydra stored."""
    import yaml

    path = folder / HYDRA
    try:
        words = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else []
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"'{path}' must be YAML, but cannot be read ({plain_line(error)}).") from error
    return tuple(map(str, words)) if isinstance(words, list) else ()


def _metrics(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: dict[tuple[int, bool], dict[str, Any]] = {}
    last = 0
    for line in lines:
        step = line.get("step")
        if not isinstance(step, int):
            continue
        line = {name: v for name, v in line.items() if v is None or isinstance(v, (int, float))}
        if step < last:  # a resumed run repeats steps
            kept = {key: earlier for key, earlier in kept.items() if key[0] < step}
        last = step
        trains = "step_seconds" in line
        # Evaluations of one step may be of the devices' models and of the merged model: keep all keys.
        kept[step, trains] = line if trains else kept.get((step, trains), {}) | line
    return [kept[key] for key in sorted(kept, key=lambda key: (key[0], not key[1]))]


def canonical(value: object) -> str:
    """Return a value as text independent of its notation: `[1, 3]` and `[1,3]` give the same text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value).replace(", ", ",")
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def differing(runs: Sequence[RunRecord], without: Sequence[str] = ()) -> list[str]:
    """Return the settings in which the runs differ, in the order of their first occurrence.

    A key that only some runs have typed is compared with the other runs' configured values. Only the typed
    keys are known of a run without plan.
    """
    keys = dict.fromkeys(key for run in runs for key in run.settings)

    def differs(key: str) -> bool:
        return len({run.setting(key) for run in runs if run.plan is not None or key in run.settings}) > 1

    return [key for key in keys if key not in without and of_a_run([key]) and differs(key)]
