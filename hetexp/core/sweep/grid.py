"""Composes the first jobs of a sweep from its `params` and the typed words, to check them before a start."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hetexp.core.compose.loader import config_loader, without_hydra
from hetexp.core.compose.overrides import Overrides
from hetexp.core.errors import ConfigError
from hetexp.core.sweep.search import dimension, jobs, merged, settings_problems

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override

MOST_JOBS = 32
"""Most jobs of a sweep that are composed and checked before the first one starts."""
NEEDS_OPTUNA = (
    "hydra/sweeper=hetexp_optuna needs Optuna, which is not installed: pip install 'hetexp[search]'"
)
_BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_SEARCH = "hydra_plugins.hetexp_optuna_sweeper.OptunaSweeper"


@dataclass(frozen=True)
class Job:
    """One job of a sweep, or one example of what a search may try."""

    label: str
    config: DictConfig


def asks_to_sweep(typed: Sequence[str], **where: Any) -> bool:
    """Return whether an experiment itself is a sweep (`hydra.mode: MULTIRUN`).

    Args:
        where: the folders and the name of the configuration, as for `compose_typed`.
    """
    words = [word for word in typed if word.lstrip("+").startswith(("experiment=", "hydra.mode="))]
    if not words:
        return False
    with contextlib.suppress(HydraException), config_loader(**where) as (loader, name):
        composed = loader.load_configuration(name, words, run_mode=RunMode.RUN)
        # When Hydra loads for one run, it does not change the mode of the configuration.
        return bool(OmegaConf.select(composed, "hydra.mode") == RunMode.MULTIRUN)
    return False


def compose_jobs(typed: Sequence[str], **where: Any) -> tuple[list[Job], list[str]]:
    """Compose the first jobs of a sweep.

    Args:
        typed: a list gets signs, as by `compose_typed`.
        where: the folders and the name of the configuration, as for `compose_typed`.

    Returns:
        The jobs, and one sentence for each mistake. Both are empty if another sweeper decides the runs.
    """
    try:
        with config_loader(**where) as (loader, name):
            overrides = Overrides(loader, name, typed, True)
            if isinstance(typed, list):
                typed[:] = overrides.words
            if overrides.problems:
                return [], overrides.problems
            try:
                sweeper = overrides.compose().hydra.sweeper
            except HydraException:  # it may need the swept values: the jobs report what is wrong
                sweeper = OmegaConf.create({"_target_": _BASIC})
            if overrides.problems or sweeper._target_ not in (_BASIC, _SEARCH):
                return [], overrides.problems
            return _composed(loader, name, overrides.words, sweeper)
    except HydraException as error:
        return [], [str(error)]


def _composed(
    loader: ConfigLoader, name: str, typed: Sequence[str], sweeper: Any
) -> tuple[list[Job], list[str]]:
    params: Mapping[str, Any] = sweeper.get("params") or {}
    overrides = merged({str(key): value for key, value in params.items()}, typed, loader)
    configured = [str(override.input_line) for override in overrides if override.input_line not in typed]
    if configured:
        wrong = Overrides(loader, name, [*typed, *configured], True).problems
        if wrong:
            return [], [f"{problem} It is swept in `hydra.sweeper.params`." for problem in wrong]
    search = sweeper._target_ == _SEARCH
    problems = _search_problems(sweeper, overrides) if search else []
    if problems:
        return [], problems
    swept = {override.get_key_element() for override in overrides if override.is_sweep_override()}
    composed: list[Job] = []
    failed: dict[str, str] = {}
    for number, words in enumerate(jobs(overrides, MOST_JOBS)):
        chosen = " ".join(word for word in words if word.partition("=")[0] in swept)
        label = f"{'A trial' if search else f'Job {number}'} ({chosen or 'all as typed'})"
        try:
            config = loader.load_configuration(name, list(words), run_mode=RunMode.RUN)
            composed.append(Job(label, without_hydra(config)))
        except HydraException as error:
            failed.setdefault(str(error), label)
    return composed, [f"{label} cannot be composed: {reason}" for reason, label in failed.items()]


def _search_problems(sweeper: Any, overrides: Sequence[Override]) -> list[str]:
    """Return the problems of a search's settings and dimensions."""
    problems = settings_problems(sweeper)
    for override in overrides:
        try:
            if override.is_sweep_override():
                dimension(override)
        except ConfigError as error:
            problems += error.problems
    if find_spec("optuna") is None:
        problems.append(NEEDS_OPTUNA)
    return problems
