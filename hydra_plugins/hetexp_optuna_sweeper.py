"""`hydra/sweeper=hetexp_optuna`: Optuna proposes the runs of a sweep, and Hydra's launcher runs them.

Hydra imports all of `hydra_plugins` in every application, so that only a search imports Optuna.
"""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction

from hetexp.core.sweep.search import SearchConfig

if TYPE_CHECKING:
    import optuna
    from hydra.core.override_parser.types import Override
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig
    from optuna.distributions import BaseDistribution

    from hetexp.core.sweep.search import Dimension, Outcome

STUDY = "hetexp"
STORAGE = "search.journal"
"""Optuna's journal of all trials, in the sweep's folder."""
RESULTS = "optimization_results.yaml"

ConfigStore.instance().store(
    group="hydra/sweeper", name="hetexp_optuna", node=SearchConfig, provider="hetexp"
)


class OptunaSweeper(Sweeper):
    """Runs the trials that Optuna proposes, and reports their results to Optuna.

    The arguments are those of `SearchConfig`.
    """

    def __init__(
        self,
        n_trials: int,
        n_jobs: int,
        sampler: str,
        seed: int | None,
        direction: str,
        objective: str,
        seeds: Sequence[int] | None = None,
        params: DictConfig | None = None,
    ) -> None:
        self.n_trials, self.n_jobs = n_trials, n_jobs
        self.sampler, self.seed = sampler, seed
        self.direction, self.objective = direction, objective
        self.seeds = list(seeds or ())
        self.params = {str(key): value for key, value in (params or {}).items()}
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None
        self.hydra_context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins

        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run trials until there are `n_trials`, and record the best.

        Raises:
            CompactHydraException: the search cannot start, has no result, or runs of it failed.
        """
        from hydra.errors import CompactHydraException

        from hetexp.core.errors import HetexpError

        try:
            self._search(arguments)
        except HetexpError as error:
            raise CompactHydraException(str(error)) from None

    def _search(self, arguments: list[str]) -> None:
        from omegaconf import OmegaConf

        from hetexp.core.errors import RunFailedError
        from hetexp.core.sweep.search import merged

        self._check()
        assert self.config is not None
        assert self.hydra_context is not None
        overrides = merged(self.params, arguments, self.hydra_context.config_loader)
        fixed, dimensions = _fixed_and_varied(overrides)
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        study = self._study(folder)
        failed = self._run_trials(study, folder, fixed, dimensions)
        best = _best(study)
        self._conclude(study, folder, best)
        if failed:
            raise RunFailedError(
                f"{len(failed)} of the search's runs failed, the first: {failed[0]}. The search went on."
            )
        if best is None:
            reasons = [trial.user_attrs["reason"] for trial in study.trials if "reason" in trial.user_attrs]
            raise RunFailedError(
                f"No trial has a result; the last: {reasons[-1] if reasons else 'none ran'}."
            )

    def _check(self) -> None:
        """Check the settings before anything starts.

        Raises:
            ConfigError: names all wrong settings.
            SetupError: Optuna is not installed.
        """
        from hetexp.core.errors import ConfigError, SetupError
        from hetexp.core.sweep.grid import NEEDS_OPTUNA
        from hetexp.core.sweep.search import settings_problems

        settings = ("n_trials", "n_jobs", "sampler", "direction")
        problems = settings_problems({name: getattr(self, name) for name in settings})
        if problems:
            raise ConfigError(problems)
        try:
            import optuna  # noqa: F401
        except ImportError:
            raise SetupError(NEEDS_OPTUNA) from None

    def _study(self, folder: Path) -> optuna.Study:
        """Return the study in the sweep's folder, whose interrupted trials count as failed."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
        from optuna.study import StudyDirection
        from optuna.trial import TrialState

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = str(folder / STORAGE)
        storage = JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))
        direction = StudyDirection[self.direction.upper()]
        study = optuna.create_study(
            storage=storage, study_name=STUDY, direction=direction, load_if_exists=True
        )
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)
        # With the same seed, a continued random search would propose its first trials again.
        seed = None if self.seed is None else self.seed + len(study.trials)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = (
                optuna.samplers.RandomSampler(seed=seed)
                if self.sampler == "random"
                else optuna.samplers.TPESampler(seed=seed, constant_liar=self.n_jobs > 1)
            )
        return study

    def _run_trials(
        self, study: optuna.Study, folder: Path, fixed: list[str], dimensions: list[Dimension]
    ) -> list[str]:
        """Run the missing trials; return the error of each run that failed."""
        from optuna.trial import TrialState

        failed: list[str] = []
        space = {dimension.key: _distribution(dimension) for dimension in dimensions}
        while (missing := self.n_trials - len(study.trials)) > 0:
            trials = [study.ask(space) for _ in range(min(self.n_jobs, missing))]
            chosen = [[*fixed, *_typed(trial.params)] for trial in trials]
            returns = self._launch(trials[0].number, chosen)
            for trial, words, group in zip(trials, chosen, returns, strict=True):
                outcomes = [self._outcome(folder, job, failed) for job in group]
                reasons = [outcome.reason for outcome in outcomes if outcome.value is None]
                label = f"Trial {trial.number} ({' '.join(words[len(fixed) :])})"
                if reasons:
                    trial.set_user_attr("reason", reasons[0])
                    study.tell(trial, state=TrialState.FAIL)
                    _say(f"{label}: no result, {reasons[0]}")
                    continue
                value = sum(outcome.value or 0.0 for outcome in outcomes) / len(outcomes)
                study.tell(trial, value)
                _say(f"{label}: {self.objective} {value:.6g}")
        return failed

    def _launch(self, number: int, chosen: list[list[str]]) -> list[list[JobReturn]]:
        """Run each trial once for each seed, in one batch of the launcher; return the results by trial."""
        assert self.launcher is not None
        seeds = [[f"trainer.seed={seed}"] for seed in self.seeds] or [[]]
        batch = [[*words, *seed] for words in chosen for seed in seeds]
        self.validate_batch_is_legal(batch)
        # A trial keeps its numbers when the search is continued.
        returns = list(self.launcher.launch(batch, initial_job_idx=number * len(seeds)))
        return [returns[i : i + len(seeds)] for i in range(0, len(returns), len(seeds))]

    def _outcome(self, folder: Path, job: JobReturn, failed: list[str]) -> Outcome:
        from hydra.core.utils import JobStatus

        from hetexp.core.sweep.search import Outcome, folder_of, outcome

        if job.status != JobStatus.COMPLETED:
            failed.append(str(job._return_value))
            return Outcome(None, failed[-1])
        run_dir = job.hydra_cfg.hydra.runtime.output_dir if job.hydra_cfg is not None else job.working_dir
        return outcome(folder_of(folder, job.overrides or (), Path(str(run_dir))), self.objective)

    def _conclude(self, study: optuna.Study, folder: Path, best: optuna.trial.FrozenTrial | None) -> None:
        """Write the best trial to the sweep's folder, and print it with the command that trains with it."""
        from collections import Counter

        from omegaconf import OmegaConf

        from hetexp.core.files import write_text

        assert self.config is not None
        states = Counter(trial.state.name.lower() for trial in study.trials)
        results: dict[str, Any] = {
            "name": "optuna",
            "objective": self.objective,
            "direction": self.direction,
            "best_value": None if best is None else best.value,
            "best_params": {} if best is None else _rounded(best.params),
            "best_trial": None if best is None else best.number,
            "num_trials": len(study.trials),
            "trials": dict(sorted(states.items())),
        }
        write_text(folder / RESULTS, OmegaConf.to_yaml(OmegaConf.create(results)))
        if best is None:
            return
        typed = [str(word) for word in self.config.hydra.overrides.task]
        words = _command(typed, _typed(best.params))
        _say(f"Best of {len(study.trials)} trials: {self.objective} {best.value:.6g} in trial {best.number}")
        _say(f"  {words}")
        _say(f"The search: {folder / RESULTS}")


def _fixed_and_varied(overrides: Sequence[Override]) -> tuple[list[str], list[Dimension]]:
    """Return the words of all trials, and the dimensions of the search.

    Raises:
        ConfigError: there is no dimension, or one has no values.
    """
    from hetexp.core.errors import ConfigError
    from hetexp.core.sweep.search import dimension, examples

    fixed = [examples(override)[0] for override in overrides if not override.is_sweep_override()]
    problems, dimensions = [], []
    for override in overrides:
        if override.is_sweep_override():
            try:
                dimensions.append(dimension(override))
            except ConfigError as error:
                problems += error.problems
    if not dimensions and not problems:
        problems.append("`hydra.sweeper.params` must name at least one key to search over, but names none.")
    if problems:
        raise ConfigError(problems)
    return fixed, dimensions


def _distribution(dim: Dimension) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dim.choices:
        return CategoricalDistribution(dim.choices)
    if dim.whole:
        return IntDistribution(int(dim.low), int(dim.high), log=dim.log, step=int(dim.step or 1))
    return FloatDistribution(dim.low, dim.high, log=dim.log, step=dim.step)


def _rounded(params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters with readable numbers, which the runs get as well."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in params.items()}


def _typed(params: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in _rounded(params).items()]


def _best(study: optuna.Study) -> optuna.trial.FrozenTrial | None:
    from optuna.trial import TrialState

    return study.best_trial if study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) else None


def _command(typed: Sequence[str], best: Sequence[str]) -> str:
    """Return the command that trains once with the best parameters, and the search's other words."""
    chosen = {word.partition("=")[0].lstrip("+") for word in best}
    kept = [word for word in typed if word.partition("=")[0].lstrip("+") not in chosen]
    program = Path(sys.argv[0])
    start = ["python", program.name] if program.suffix == ".py" else ["hetexp", "train"]
    return shlex.join([*start, *kept, *best, "hydra.mode=RUN"])


def _say(text: str) -> None:
    print(text, flush=True)
