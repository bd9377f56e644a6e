"""The dimensions of a sweep in Hydra's grammar, and the outcomes of a search's runs, without Optuna."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from hetexp.core.errors import ConfigError, did_you_mean, must_be
from hetexp.core.sweep.folder import key_of, read_rows

THROUGHPUT = "throughput"
"""Objective of samples per second, for emulated devices in their own time, because time scales differ."""
SAMPLERS = ("tpe", "random")
DIRECTIONS = ("maximize", "minimize")


@dataclass
class SearchConfig:
    """The settings of a search, below `hydra.sweeper`."""

    _target_: str = "hydra_plugins.hetexp_optuna_sweeper.OptunaSweeper"
    n_trials: int = 20
    """Number of trials, including those of an earlier start in the same folder."""
    n_jobs: int = 1
    """Trials that are proposed at a time."""
    sampler: str = "tpe"
    """Sampler: `tpe` (tree-structured Parzen estimator) or `random`."""
    seed: int | None = 0
    """Seed of the sampler; `null`: a random one."""
    direction: str = "maximize"
    """Direction of the objective: `maximize` or `minimize`."""
    objective: str = "throughput"
    """Objective: `throughput`, or a key of `summary.json` with dots, such as `final.eval.loss`."""
    seeds: list[int] | None = None
    """Values of `trainer.seed` that each trial runs with, such as `[0,1]`; their mean counts."""
    params: dict[str, Any] | None = None
    """Keys to vary, in Hydra's grammar: `choice(a,b)`, `range(1,5)`, `tag(log, interval(0.1, 10))`."""


@dataclass(frozen=True)
class Dimension:
    """A key that a search varies: over choices, or over numbers from `low` to `high`, both included."""

    key: str
    """Text before `=`."""
    choices: tuple[str, ...] = ()
    """Texts after `=`; empty for numbers."""
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False
    """Whether the numbers are integers."""


def settings_problems(settings: Any) -> list[str]:
    """Return the problems with the settings of a search, a mapping of names below `hydra.sweeper`."""
    problems = []
    for name, accepted in (("sampler", SAMPLERS), ("direction", DIRECTIONS)):
        if settings[name] not in accepted:
            fix = did_you_mean(str(settings[name]), accepted).strip()
            problems.append(must_be(f"hydra.sweeper.{name}", " or ".join(accepted), settings[name], fix))
    for name in ("n_trials", "n_jobs"):
        if settings[name] < 1:
            problems.append(must_be(f"hydra.sweeper.{name}", "at least 1", settings[name]))
    return problems


def merged(params: Mapping[str, Any] | None, typed: Sequence[str], loader: Any = None) -> list[Override]:
    """Return the overrides of `hydra.sweeper.params` and of the command line, which wins.

    Args:
        loader: Hydra's loader of configurations, for `glob(…)`.

    Raises:
        hydra.errors.HydraException: one of them cannot be read.
    """
    parser = OverridesParser.create(config_loader=loader)
    words = [f"{key}={_as_text(value)}" for key, value in (params or {}).items()]
    found = {_key(override): override for override in parser.parse_overrides(words)}
    for override in parser.parse_overrides(list(typed)):
        found[_key(override)] = override
    return list(found.values())


def _as_text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _key(override: Override) -> str:
    """Return the overridden key, the same for `+a`, `++a` and `a`."""
    return f"{override.key_or_group}@{override.package}" if override.package else str(override.key_or_group)


def dimension(override: Override) -> Dimension:
    """Return the dimension of an override.

    `range(1,5)` ends before 5, as in Hydra; an `interval` may reach its ends.

    Raises:
        ConfigError: it has no values to choose from.
    """
    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        low, high = value.start, value.end
        whole = isinstance(low, int) and isinstance(high, int)
        found = Dimension(key, (), low or 0, high or 0, None, "log" in value.tags, whole)
    elif isinstance(value, RangeSweep):
        numbers = sorted(value.range())
        whole = all(isinstance(number, int) for number in numbers)
        if not numbers:
            raise ConfigError(must_be(key, "a range with something in it", override.get_value_string()))
        low, high = numbers[0], numbers[-1]
        found = Dimension(key, (), low, high, abs(value.step), "log" in value.tags, whole)
        if found.log:  # Optuna has no steps on a logarithmic axis
            return Dimension(key, tuple(_as_text(number) for number in numbers))
    else:
        choices = tuple(dict.fromkeys(_texts(override)))
        if not choices:
            raise ConfigError(must_be(key, "a choice of something", override.get_value_string()))
        return Dimension(key, choices)
    if found.low > found.high or (found.log and found.low <= 0):
        accepted = "an interval from a low end to a high one" + (", both above 0" if found.log else "")
        raise ConfigError(must_be(key, accepted, override.get_value_string()))
    return found


def _texts(override: Override) -> list[str]:
    """Return the typed values of a discrete sweep, without shuffling."""
    value = override.value()
    if isinstance(value, (ChoiceSweep, RangeSweep)) and value.shuffle:
        override = replace(override, _value=replace(value, shuffle=False))
    return [str(text) for text in override.sweep_string_iterator()]


def examples(override: Override) -> list[str]:
    """Return the words `key=value` of an override: all choices, or both ends of an interval."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        # `~key` has no value to show
        return [override.input_line or f"{key}={override.get_value_element_as_str()}"]
    if isinstance(override.value(), IntervalSweep):
        ends = dimension(override)
        return [f"{key}={number!r}" for number in dict.fromkeys((ends.low, ends.high))]
    return [f"{key}={text}" for text in _texts(override)]


def jobs(overrides: Iterable[Override], most: int) -> list[tuple[str, ...]]:
    """Return the overrides of the first `most` jobs of a grid, in which the last key changes fastest."""
    return list(itertools.islice(itertools.product(*map(examples, overrides)), most))


@dataclass(frozen=True)
class Outcome:
    """The result of one run of a search."""

    value: float | None
    reason: str = ""
    """Why the run does not count; empty if it counts."""


def folder_of(sweep: Path, overrides: Iterable[str], otherwise: Path) -> Path:
    """Return the folder of a job's run from its row in the sweep's file, else `otherwise`."""
    key = key_of(overrides)
    return next((sweep / row.folder for row in read_rows(sweep) if row.overrides == key), otherwise)


def outcome(folder: Path, objective: str) -> Outcome:
    """Return the objective of a run, or why it has none: it failed, or its times are not valid.

    Args:
        objective: a key of `summary.json`, with dots; or `throughput`.

    Raises:
        ConfigError: no run has such a number.
    """
    path = folder / "summary.json"
    if not path.exists():
        return Outcome(None, "it has no summary.json")
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if summary.get("status") != "completed":
        return Outcome(None, str(summary.get("error") or summary.get("status")))
    if summary.get("valid") is False:
        return Outcome(None, f"not valid: {summary.get('invalid_reason')}")
    scale = 1.0
    if objective == THROUGHPUT:
        objective, scale = "samples_per_s", float(summary.get("time_scale") or 1.0)
    value: Any = summary
    for part in objective.split("."):
        if not isinstance(value, dict) or part not in value:
            known = [THROUGHPUT, *value] if isinstance(value, dict) else []
            raise ConfigError(
                must_be(
                    "hydra.sweeper.objective",
                    "throughput or a key of summary.json",
                    objective,
                    did_you_mean(part, known).strip(),
                )
            )
        value = value[part]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return Outcome(None, f"`{objective}` in its summary.json is {value!r}, no number")
    return Outcome(float(value) * scale)
