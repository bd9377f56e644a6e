"""From the command line to a launched run: compose, check, plan, launch.

Modules that `--help` and a shell's completion do not need are imported inside the functions.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.core import start_up
from hetexp.core.compose.conf_folders import conf_dir as conf_dir
from hetexp.core.compose.conf_folders import name_own_conf_dir
from hetexp.core.compose.words import asks_for_help, where_to_look, without_hyphens, written_out
from hetexp.core.errors import ConfigError, HetexpError
from hetexp.core.streams import show_any_text

if TYPE_CHECKING:
    import argparse

    from omegaconf import DictConfig, ListConfig
    from rich.console import Console

    from hetexp.core.config import Config, HardwareConfig
    from hetexp.core.sweep.grid import Job
    from hetexp.hardware.detection.inventory import Inventory
    from hetexp.hosts.this_host import HostInfo
    from hetexp.launch.rank_source import RankSource
    from hetexp.plan.run_spec import CheckedRun, Request, RunSpec

CONFIG_NAME = "config"
ENGINE = "hetexp.engine"
"""Module of a layer above this one, hence a name instead of an import."""
OUTSIDE_SCRIPT = ("strategy", "balancing", "logger")
"""Sections that also a user's own script needs (`hetexp launch`)."""
PARENT_POLL_SECONDS = 0.5
_typed_here = False
"""Whether `main` ran in this process; joblib and submitit run a sweep's jobs in other processes."""


def main() -> None:
    """Run the command line of `train.py` and of `hetexp train`."""
    from hetexp.launch.environments.interpreter import check_own_interpreter

    start_up.ended("interpreter")
    show_any_text()
    try:
        check_own_interpreter()
    except HetexpError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    from hydra._internal.utils import get_args_parser

    from hetexp.core.rank_env import find_rank_env
    from hetexp.launch.sweep.run import as_typed

    global _typed_here
    _typed_here = True
    register_resolvers()
    _share_config_store()
    # The user's own classes may be beside train.py and in the current folder.
    sys.path.append(str(Path.cwd()))
    as_typed(sys.argv)
    parser = get_args_parser()
    sys.argv[1:] = written_out(without_hyphens(sys.argv[1:], parser._option_string_actions))
    arguments = parser.parse_args()
    name_own_conf_dir(Path(arguments.config_dir) if arguments.config_dir else None)
    try:
        rank_env = None if asks_for_help(arguments) else find_rank_env()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if rank_env is None:
        start(arguments)
    else:
        pkgutil.resolve_name(f"{ENGINE}:run_rank")(rank_env, arguments)


def start(arguments: argparse.Namespace, ranks: RankSource | None = None) -> None:
    """Check the command line, and let Hydra run it.

    Args:
        ranks: source of the ranks; by default the configuration decides (`own_ranks`).

    Raises:
        SystemExit: with the exit code of the command.
    """
    import hydra

    from hetexp.launch.sweep.end import concluded

    typed = list(arguments.overrides)
    problems = check_command_line(arguments, ranks)
    if problems:
        print(ConfigError(problems), file=sys.stderr)
        sys.exit(2)
    signed = dict(zip(typed, arguments.overrides, strict=True))  # Hydra parses the command line again
    sys.argv[1:] = [signed.get(word, word) for word in sys.argv[1:]]

    def job(cfg: DictConfig) -> None:
        _job(cfg, ranks)

    try:
        with concluded():
            hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, version_base="1.3")(job)()
    except KeyboardInterrupt:
        sys.exit(130)


def register_resolvers() -> None:
    """Register the resolvers with which `conf/config.yaml` names folders.

    `${hetexp_run:}` is a unique name of a run, `${hetexp_sweep:name}` the folder of a sweep, and
    `${hetexp_job:sweep,number,overrides}` the folder of a job.
    """
    from omegaconf import OmegaConf

    from hetexp.core.sweep.folder import new_name, sweep_name

    functions: dict[str, Callable[..., str]] = {"run": new_name, "sweep": sweep_name, "job": _job_folder}
    for name, function in functions.items():
        OmegaConf.register_new_resolver(f"hetexp_{name}", function, use_cache=True, replace=True)


def _job_folder(sweep: str, number: int, overrides: ListConfig) -> str:
    from hetexp.core.sweep.folder import job_folder

    return job_folder(Path(sweep), number, _as_texts(overrides))


def _as_texts(overrides: Any) -> tuple[str, ...]:
    """Return Hydra's list of overrides, with interpolations unresolved."""
    from omegaconf import OmegaConf

    texts: Any = OmegaConf.to_container(overrides, resolve=False)
    return tuple(texts)


def _share_config_store() -> None:
    """Keep Hydra from copying its store of configurations for each of the hundred lookups of `--help`.

    The store does not change once the plugins are loaded, and `ConfigStore.load` returns copies.
    """
    from hydra.core.config_store import ConfigStore

    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of some overrides, for scripts and tests that start runs themselves."""
    from hydra import compose, initialize_config_dir

    from hetexp.core.compose.loader import without_hydra

    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return without_hydra(compose(CONFIG_NAME, list(overrides), return_hydra_config=True))


def check_command_line(arguments: argparse.Namespace, ranks: RankSource | None = None) -> list[str]:
    """Return every mistake in the command line; Hydra itself would stop at the first one."""
    from hetexp.core.compose.overrides import compose_typed
    from hetexp.core.sweep.grid import asks_to_sweep, compose_jobs
    from hetexp.plan.run_spec import Request

    if asks_for_help(arguments) or not arguments.overrides or arguments.experimental_rerun:
        return []
    where = where_to_look(arguments)
    if arguments.multirun or asks_to_sweep(arguments.overrides, **where):
        jobs, problems = compose_jobs(arguments.overrides, **where)
        return list(dict.fromkeys(problems or _check_jobs(jobs)))
    composed, problems = compose_typed(arguments.overrides, **where)
    start_up.ended("configuration composed")
    if composed is not None:
        request = Request(Path.cwd(), Path.cwd(), overrides=tuple(arguments.overrides))
        problems = check(composed, request, ranks=ranks, problems=problems).problems
    return list(dict.fromkeys(problems))


def _check_jobs(jobs: Sequence[Job]) -> list[str]:
    """Return the problems of a sweep whose jobs are all wrong; else print those of the wrong jobs.

    The other jobs run, and the sweep ends with an error.
    """
    from hetexp.plan.run_spec import Request

    labels_of: dict[str, list[str]] = {}
    request = Request(Path.cwd(), Path.cwd())
    for job in jobs:
        for problem in check(job.config, request, leases=False).problems:  # a job waits for its cards
            labels_of.setdefault(problem, []).append(job.label)
    refused = {label for labels in labels_of.values() for label in labels}
    lines = []
    for problem, labels in labels_of.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        lines.append(problem if len(labels) == len(jobs) else f"{labels[0]}{more}: {problem}")
    if jobs and len(refused) == len(jobs):
        return lines
    for line in lines:
        print(f"Will be refused: {line}", file=sys.stderr)
    return []


def _job(cfg: DictConfig, ranks: RankSource | None) -> None:
    """Run one job; Hydra calls it with the composed configuration."""
    import hydra.utils
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import CompactHydraException
    from hydra.types import RunMode

    from hetexp.core.compose.loader import without_idle_arguments
    from hetexp.core.files import ending_when_full
    from hetexp.core.sweep.folder import of_a_run
    from hetexp.launch.sweep.run import run_job
    from hetexp.plan.run_spec import Request

    job = HydraConfig.get()
    if not _typed_here:
        _end_with_parent()
        named = (
            Path(source.path) for source in job.runtime.config_sources if source.provider == "command-line"
        )
        name_own_conf_dir(next(named, None))
    working_dir = Path(hydra.utils.get_original_cwd())
    sweep = working_dir / job.sweep.dir if job.mode == RunMode.MULTIRUN else None
    request = Request(
        run_dir=Path(job.runtime.output_dir),
        working_dir=working_dir,
        choices={k: str(v) for k, v in job.runtime.choices.items() if not k.startswith("hydra/") and v},
        overrides=of_a_run(_as_texts(job.overrides.task)),
        group=sweep.name if sweep is not None else None,
        sweep=sweep,
    )
    start_up.ended("Hydra")
    job_folder = Path.cwd()
    os.chdir(request.working_dir)  # relative paths start from the user's folder, even with hydra.job.chdir
    try:
        without_idle_arguments(cfg, job.runtime.choices, _as_texts(job.overrides.task))
        with ending_when_full(request.run_dir):
            if sweep is None:
                run(cfg, request, ranks=ranks)
            else:
                run_job(job.job.num, request, partial(run, cfg, request))
    except HetexpError as error:
        if sweep is not None and error.exit_code <= 128:  # a signal ends a whole sweep, a failure one job
            raise CompactHydraException(str(error)) from None
        if not error.shown:
            print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    finally:
        os.chdir(job_folder)
        start_up.restart()  # this process may have more jobs


@cache  # once in a process, which may run several jobs
def _end_with_parent() -> None:
    """Send this process SIGTERM when its parent is gone.

    Otherwise a worker of joblib would not notice that its sweep was killed, and its ranks would train on.
    """
    parent = os.getppid()

    def watch() -> None:
        pause = threading.Event()
        while not pause.wait(PARENT_POLL_SECONDS):
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)  # repeatedly, because the first may end only the job

    threading.Thread(target=watch, name="parent", daemon=True).start()


def run(
    cfg: DictConfig, request: Request, console: Console | None = None, ranks: RankSource | None = None
) -> dict[str, Any]:
    """Check, plan and launch one run.

    Args:
        ranks: source of the ranks; by default the configuration decides (`own_ranks`).

    Returns:
        Its summary; with `plan_only` its prediction instead.

    Raises:
        ConfigError: everything that is wrong with the configuration, before any process starts.
        RunFailedError: the run was started and did not finish, or its disk is full.
    """
    from omegaconf import OmegaConf
    from rich.console import Console

    from hetexp.launch.rank_source import LauncherRanks

    show_any_text()  # `main` ran in another process if a sweep's launcher or another engine started this one
    console = console or Console()
    if ranks is not None or not OmegaConf.select(cfg, "cluster.hosts"):
        return _run(cfg, request, console, ranks or LauncherRanks())
    from hetexp.hosts.leader import all_joined
    from hetexp.hosts.member import run_member

    info, config = _host_info(cfg, request)
    if info.leads:
        with all_joined(info, request.run_dir, console) as joined:
            return _run(cfg, request, console, joined)
    shared = config.hardware.share_devices
    return run_member(info, request.run_dir, request.working_dir, shared, console)


def own_ranks(config: Config) -> RankSource:
    """Return the source of the ranks if no other engine has started them."""
    if config.cluster.hosts:
        from hetexp.hosts.cluster_ranks import ClusterRanks

        return ClusterRanks()
    from hetexp.launch.rank_source import LauncherRanks

    return LauncherRanks()


def _host_info(cfg: DictConfig, request: Request) -> tuple[HostInfo, Config]:
    """Return this machine's part of a cluster, and the typed configuration.

    Raises:
        ConfigError: all that is wrong with the configuration, or with this machine's devices.
    """
    from hetexp.core.compose.plain import plain
    from hetexp.hosts.this_host import host_info

    checked = check(cfg, request)
    if request.sweep is not None:
        fix = "Start its jobs one by one, on all machines."
        checked.problems.append(f"`cluster.hosts` must be empty in a sweep (-m). {fix}")
    spec = checked.accepted()
    raw, selection = plain(cfg)[0], spec.selection
    info = host_info(spec.config, raw, selection.devices, selection.threads, request.working_dir)
    return info, spec.config


def _run(cfg: DictConfig, request: Request, console: Console, ranks: RankSource) -> dict[str, Any]:
    """Check, plan and launch one run with the ranks of a source."""
    from hetexp.core.files import ending_when_full
    from hetexp.launch.processes.process import import_ahead
    from hetexp.launch.reserve import reserved
    from hetexp.launch.resume import find, going_on, held
    from hetexp.launch.terminal.lines import print_line

    with reserved(lambda leases: check(cfg, request, leases, ranks), request, console) as checked:
        found = None
        if checked.spec is not None:
            try:
                found = find(checked.spec)
            except HetexpError as error:
                checked.problems.extend(error.problems if isinstance(error, ConfigError) else [str(error)])
        spec = checked.accepted()
        start_up.ended("run checked")
        if _typed_here:
            import_ahead(spec.config, [device.backend for device in spec.selection.devices])
        assert found is not None
        for sentence in found.sentences:
            print_line(console, sentence)
        if found.finished:
            done: dict[str, Any] = json.loads((request.run_dir / "summary.json").read_text(encoding="utf-8"))
            return done
        with ending_when_full(request.run_dir), held(found, request.run_dir):
            return _plan_and_launch(going_on(spec, found), console, ranks)


def _plan_and_launch(spec: RunSpec, console: Console, ranks: RankSource) -> dict[str, Any]:
    """Plan and launch a run that has passed all checks."""
    from omegaconf import OmegaConf

    from hetexp.core.files import write_text
    from hetexp.launch.prepare.preparation import prepare
    from hetexp.launch.prepare.select_strategy import select_strategy
    from hetexp.plan.calibrations import drop_if_wrong
    from hetexp.plan.planner import make_plan

    measured = partial(ranks.measure, console=console)
    if not spec.config.plan_only:
        spec = select_strategy(spec, console, measured if ranks.running else None)
    run_dir = spec.request.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    plan = make_plan(spec)
    write_text(run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(spec.raw)))
    if spec.config.plan_only:
        return _predict(spec, console)
    plan = prepare(plan, spec, measured)
    start_up.ended("plan")
    summary = ranks.launch(plan, spec, console)
    warning = drop_if_wrong(plan, summary)
    if warning is not None:
        console.print(warning, style="yellow", highlight=False, soft_wrap=True)
    return summary


def _predict(spec: RunSpec, console: Console) -> dict[str, Any]:
    """Print the prediction for each strategy and policy, and write it to the run folder."""
    from hetexp.core.files import write_json
    from hetexp.launch.prepare.planning import PredictionRequest, predict_run
    from hetexp.launch.terminal.prediction import show

    prediction = predict_run(spec, PredictionRequest())
    show(prediction, console)
    path = spec.request.run_dir / "prediction.json"
    write_json(path, prediction.to_dict())
    console.print(f"Nothing was started (plan_only=true). The same as JSON: {path}", soft_wrap=True)
    return prediction.to_dict()


def compose_and_check(
    words: Sequence[str], request: Request, config_dir: str | None = None, leases: bool = True
) -> CheckedRun:
    """Compose and check the words of a command line, as `hetexp train` does, without a start.

    Args:
        config_dir: a folder of the user's own options.
        leases: as for `check`.
    """
    from hetexp.core.compose.overrides import compose_typed
    from hetexp.plan.run_spec import CheckedRun

    register_resolvers()
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # the user's own classes
    name_own_conf_dir(Path(config_dir) if config_dir else None)
    composed, problems = compose_typed(written_out(list(words)), config_dir=config_dir)
    if composed is None:
        return CheckedRun(None, problems)
    return check(composed, request, leases, problems=problems)


def check(
    cfg: DictConfig,
    request: Request,
    leases: bool = True,
    ranks: RankSource | None = None,
    problems: Sequence[str] = (),
) -> CheckedRun:
    """Return the run of a configuration with its devices, and everything that is wrong with it.

    Wrong keys and types are reported without torch, whose import takes seconds, unless the user also typed a
    value that only torch's classes can judge. The section `sweep`, which changes no run, is left out.

    Args:
        request: relative paths start from its working directory.
        leases: whether cards that other runs hold are busy.
        ranks: source of the ranks; by default the configuration decides (`own_ranks`).
        problems: those of the words from which the configuration was composed.
    """
    from hetexp.core.compose.plain import plain, typed_for_torch
    from hetexp.core.config import COMPONENTS, check_config
    from hetexp.core.instantiate import check_component
    from hetexp.launch.processes.process import import_ahead
    from hetexp.plan.run_spec import CheckedRun

    raw, missing, unresolved = plain(cfg)
    config, wrong = check_config(raw)
    raw.pop("sweep", None)
    sections = [key for key in (COMPONENTS if request.script is None else OUTSIDE_SCRIPT) if key in raw]
    early = [problem for key in sections for problem in check_component(key, raw[key], imports=False)]
    reported, spec = [*problems, *unresolved, *wrong, *early], None
    if reported and not typed_for_torch(request.overrides, reported):
        wrong += early
    else:
        start_up.ended("keys and types")
        if _typed_here and not reported and config is not None:
            import_ahead(config)
        components = {key: check_component(key, raw[key]) for key in sections}
        spec = _check_imported(raw, config, components, request, leases, ranks, wrong)
    # A missing key was reported already, and its null is of the wrong type as well.
    wrong = [p for p in wrong if not any(p.startswith(f"`{key}") for key in missing)]
    return CheckedRun(spec, [*problems, *unresolved, *wrong])


def _check_imported(
    raw: dict[str, Any],
    config: Config | None,
    components: Mapping[str, list[str]],
    request: Request,
    leases: bool,
    ranks: RankSource | None,
    wrong: list[str],
) -> RunSpec | None:
    """Return the run with its devices; append everything that is wrong with them and with its classes.

    Args:
        components: section → problems of its class.
    """
    from hetexp.data.base import check_samples
    from hetexp.hardware.selection.pool import Selection
    from hetexp.optimizer.build import check_optimizer, check_schedule
    from hetexp.plan.run_spec import RunSpec

    wrong += [problem for sentences in components.values() for problem in sentences]
    if not components.get("optimizer", True):
        wrong += check_optimizer(raw["optimizer"]) + (check_schedule(config) if config is not None else [])
    if not components.get("data", True):
        wrong += check_samples(raw["data"])
    if config is None:
        return None
    start_up.ended("classes, with torch")
    spec = RunSpec(config, raw, Selection(), request)
    return _with_devices(spec, components, leases, ranks or own_ranks(config), wrong)


def _with_devices(
    spec: RunSpec, components: Mapping[str, list[str]], leases: bool, ranks: RankSource, problems: list[str]
) -> RunSpec:
    """Return a run with its devices.

    Args:
        components: section → problems of its class.
        problems: those of the configuration, to which all others are added.
    """
    from hetexp.core.config import for_devices
    from hetexp.plan.fallback import fall_back
    from hetexp.plan.planner import check_plan
    from hetexp.training.streams import check_stream

    config, request = spec.config, spec.request
    problems += _check_run(spec, ranks.has_run_folder(config))
    local = config
    if not problems:
        try:
            local = ranks.local_config(config)
        except ConfigError as error:
            problems += error.problems
    pythons = [python for host in config.cluster.hosts for python in host.pythons]
    inventory = detect_for(local.hardware, request.working_dir, leases, pythons)
    usable = request.script is None and not any(components.values())
    selection = ranks.select(local, inventory, partial(need_bytes, spec, inventory) if usable else None)
    problems += ranks.check(config, None if components["strategy"] else spec.strategy, selection)
    config, raw = ranks.adapt(config, spec.raw)
    each, count = config.trainer.batch_size_per_device, len(selection.devices)
    config, raw = for_devices(config, raw, max(1, count))  # without a device nothing starts
    if each is not None:
        total = config.trainer.global_batch_size
        selection.reasons.append(f"A step takes {total} samples: {each} × {count} chosen devices.")
    spec = spec.replaced(config=config, raw=raw, selection=selection)
    built = not (components["strategy"] or components["balancing"])
    if built:
        spec = fall_back(spec)
    problems += check_stream(spec.strategy, spec.config) if usable else []
    problems += check_plan(spec, built) if ranks.complete else selection.problems
    if ranks.complete and usable and not any(problem.startswith("`strategy") for problem in problems):
        problems += spec.strategy.check_model(spec.config)
    return spec


def _check_run(spec: RunSpec, has_run_folder: bool) -> list[str]:
    """Return the problems of the loss that is imported, and of the checkpoint to resume from."""
    from hetexp.checkpoint.choose import ResumeRequest, choose
    from hetexp.checkpoint.manifest import search_rank_checkpoints
    from hetexp.launch.resume import resumes_ranks
    from hetexp.training.loss import check_loss

    config, working_dir = spec.config, spec.request.working_dir
    problems = check_loss(config.trainer.loss, config.loss.arguments()) if spec.request.script is None else []
    resume = config.resume if has_run_folder else None
    wanted = ResumeRequest.read(resume, working_dir) if resume is not None else None
    if wanted is not None and wanted.path is not None:  # otherwise `find` needs the run folder
        path = working_dir / wanted.path
        try:
            if resumes_ranks(spec, path):
                search_rank_checkpoints(path)
            else:
                choose(path, wanted.which, config.trainer.early_stopping.metric, contents=False)
        except ConfigError as error:
            problems += error.problems
        except HetexpError as error:
            problems.append(str(error))
    return problems


def need_bytes(spec: RunSpec, inventory: Inventory, count: int) -> int | None:
    """Return the memory that the run needs on each of `count` cards with equal shares; `None`: not known."""
    from hetexp.core.precision import choose_precisions
    from hetexp.training.measuring.estimate import RunMemory

    devices = [card.spec for card in inventory.cards][:1]
    if not devices:
        return None
    trainer = spec.config.trainer
    local = trainer.batch_size_per_device or -(-trainer.global_batch_size // count)
    precisions = choose_precisions(trainer.precision, devices)
    (estimate,) = RunMemory(spec.config, devices, [local], precisions, spec.strategy).estimates
    return estimate.total_bytes if estimate is not None else None


def detect_for(
    hardware: HardwareConfig, working_dir: Path, leases: bool = True, pythons: Sequence[str] = ()
) -> Inventory:
    """Return the machine's cards, with the interpreters that drive them and the processes that use them.

    Args:
        pythons: further interpreters that may drive cards.
    """
    from hetexp.hardware.backend import add_backends
    from hetexp.hardware.detection.builds import known_builds, read_builds
    from hetexp.hardware.detection.busy import who_is_busy
    from hetexp.hardware.detection.inventory import detect
    from hetexp.hardware.detection.machine import Machine

    machine, problems = Machine(), add_backends(hardware.backends)
    named = [str(working_dir / entry.python) for entry in hardware.devices if entry.python is not None]
    named += [str(working_dir / python) for python in pythons]
    builds = [*known_builds(), *read_builds(path for path in named if Path(path).is_file())]
    inventory = detect(machine, builds, who_is_busy(machine, hardware.busy_memory_mib, leases))
    inventory.problems += problems
    return inventory
