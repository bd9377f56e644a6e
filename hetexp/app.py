"""From the command line to a launched run: compose, check, plan, launch.

Whatever is not needed to answer `--help` or a shell's completion is imported where it is used.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.core.conf_folders import conf_dir as conf_dir
from hetexp.core.conf_folders import name_own_conf_dir
from hetexp.core.errors import ConfigError, HetexpError, RunFailedError, must_be
from hetexp.core.words import written_out

if TYPE_CHECKING:
    import argparse

    from omegaconf import DictConfig
    from rich.console import Console

    from hetexp.core.config import Config, HardwareConfig
    from hetexp.core.plan import Plan
    from hetexp.hardware.detection import Inventory
    from hetexp.plan.planner import Request
    from hetexp.training.estimate import RunMemory

CONFIG_NAME = "config"
PARENT_POLL_SECONDS = 0.5
_typed_here = False
"""Whether `main` ran in this process: joblib and submitit have processes of their own for a sweep's jobs."""


def main() -> None:
    """Run the command line of `train.py` and of `hetexp train`."""
    from hetexp.launch.interpreter import check_own_interpreter

    try:
        check_own_interpreter()
    except HetexpError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    import hydra
    from hydra._internal.utils import get_args_parser

    global _typed_here
    _typed_here = True
    register_resolvers()
    _share_config_store()
    # A person's own classes are found beside train.py and in the folder that it is started from.
    sys.path.append(str(Path.cwd()))
    sys.argv[1:] = written_out(sys.argv[1:])
    arguments = get_args_parser().parse_args()
    name_own_conf_dir(Path(arguments.config_dir) if arguments.config_dir else None)
    problems = check_command_line(arguments)
    if problems:
        print(ConfigError(problems), file=sys.stderr)
        sys.exit(2)
    try:
        hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, version_base="1.3")(_job)()
    except KeyboardInterrupt:
        sys.exit(130)


def register_resolvers() -> None:
    """Register `${hetexp_run:}`, a folder name that no other run of the same second gets."""
    import secrets
    from datetime import datetime

    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver(
        "hetexp_run",
        lambda: f"{datetime.now():%H-%M-%S}-{secrets.token_hex(3)}",
        use_cache=True,
        replace=True,
    )


def _share_config_store() -> None:
    """Keep Hydra from copying its store of configurations at each of the hundred questions of `--help`.

    Nothing changes the store once the plugins are loaded, and `ConfigStore.load` copies what it returns.
    """
    from hydra.core.config_store import ConfigStore

    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of a command line, for scripts and tests that start runs themselves."""
    from hydra import compose, initialize_config_dir

    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose(CONFIG_NAME, list(overrides))


def check_command_line(arguments: argparse.Namespace) -> list[str]:
    """Return every mistake in what the person typed, before Hydra would stop at the first one."""
    from hetexp.core.overrides import compose_typed

    asks = (arguments.help, arguments.hydra_help, arguments.info, arguments.cfg, arguments.shell_completion)
    if any(asks) or not arguments.overrides or arguments.experimental_rerun:
        return []
    composed, problems = compose_typed(
        arguments.overrides,
        arguments.multirun,
        config_dir=arguments.config_dir,
        config_path=arguments.config_path,
        config_name=arguments.config_name or CONFIG_NAME,
    )
    return problems + (check(composed, Path.cwd())[3] if composed is not None else [])


def _job(cfg: DictConfig) -> None:
    """What Hydra calls once a job, with the composed configuration."""
    import hydra.utils
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import CompactHydraException
    from hydra.types import RunMode

    from hetexp.plan.planner import Request

    if not _typed_here:
        _end_with_parent()
    job = HydraConfig.get()
    sweep = Path(job.sweep.dir).name if job.mode == RunMode.MULTIRUN else None
    request = Request(
        run_dir=Path(job.runtime.output_dir),
        working_dir=Path(hydra.utils.get_original_cwd()),
        choices={k: str(v) for k, v in job.runtime.choices.items() if not k.startswith("hydra/") and v},
        overrides=tuple(job.overrides.task),
        group=sweep,
    )
    job_folder = Path.cwd()
    os.chdir(request.working_dir)  # with hydra.job.chdir, too, relative paths mean where the person stands
    try:
        run(cfg, request)
    except RunFailedError as error:
        if error.exit_code > 128:
            raise SystemExit(error.exit_code) from None  # a signal ends a whole sweep, a failure one job
        raise CompactHydraException(str(error)) from None
    except HetexpError as error:
        raise CompactHydraException(str(error)) from None
    finally:
        os.chdir(job_folder)


@cache  # once a process, however many jobs a launcher gives it
def _end_with_parent() -> None:
    """Stop a job, as SIGTERM would, when the process that started this one is gone.

    Nobody else tells a worker of joblib that its sweep was killed: its ranks would train on for nobody.
    """
    parent = os.getppid()

    def watch() -> None:
        pause = threading.Event()
        while not pause.wait(PARENT_POLL_SECONDS):
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)  # again and again: the first one may end the job only

    threading.Thread(target=watch, name="parent", daemon=True).start()


def run(cfg: DictConfig, request: Request, console: Console | None = None) -> dict[str, Any]:
    """Check, plan and launch one run.

    Returns:
        Its summary; with `plan_only` what is predicted of it instead.

    Raises:
        ConfigError: everything that is wrong with the configuration, before any process starts.
        RunFailedError: the run was started and did not finish.
    """
    from omegaconf import OmegaConf
    from rich.console import Console

    from hetexp.core.files import write_text
    from hetexp.hardware.pool import Selection
    from hetexp.launch.launcher import launch
    from hetexp.plan.calibrations import drop_if_wrong
    from hetexp.plan.planner import make_plan

    raw, config, selection, problems = check(cfg, request.working_dir)
    if (request.run_dir / "plan.json").exists():
        problems.append(
            f"`hydra.run.dir` must be a new folder, but {request.run_dir} holds a run already, whose results "
            "would be lost."
        )
    if problems:
        raise ConfigError(problems)
    assert config is not None
    assert isinstance(selection, Selection)
    request.run_dir.mkdir(parents=True, exist_ok=True)
    plan = make_plan(config, raw, selection, request)
    write_text(request.run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(raw)))
    console = console or Console()
    if config.plan_only:
        return _predict(plan, config, console)
    memory = memory_of(plan, config)
    plan = with_measured_split(plan, config, memory, console)
    plan = with_memory(plan, memory)
    summary = launch(plan, config, console)
    told = drop_if_wrong(plan, summary)
    if told is not None:
        console.print(told, style="yellow", highlight=False, soft_wrap=True)
    return summary


def _predict(plan: Plan, config: Config, console: Console) -> dict[str, Any]:
    """Print what each strategy and policy would make of the devices, and write it to the run folder."""
    from hetexp.core.files import write_json
    from hetexp.launch.planning import Wanted, foresee
    from hetexp.launch.prediction_display import show

    found = foresee(plan, config, Wanted())
    show(found, console)
    path = Path(plan.run_dir) / "prediction.json"
    write_json(path, found.to_dict())
    console.print(f"Nothing was started (plan_only=true). The same as JSON: {path}", soft_wrap=True)
    return found.to_dict()


def with_measured_split(plan: Plan, config: Config, memory: RunMemory | None, console: Console) -> Plan:
    """Return the plan with the split that measures best, where the policy asks for it and there is a choice.

    Devices that were measured for the same job before are not measured again. The split is chosen anew each
    time: the batch, the memory or the policy may ask for another one. A policy that follows the devices
    begins with whatever is known of them.

    Args:
        memory: limits the devices' passes, and caps their shares.
    """
    from dataclasses import replace

    from hetexp.core.calibration import DeviceCalibration, Exchange
    from hetexp.core.instantiate import instantiate
    from hetexp.launch.launcher import measure
    from hetexp.plan import calibrations
    from hetexp.plan.measured import begun_with, choose, replanned

    policy = instantiate(config.balancing)
    if not (policy.measures or policy.follows) or plan.world_size < 2:
        return plan
    no_limit = [None] * plan.world_size
    caps = memory.caps() if memory is not None else no_limit
    whole = [config.trainer.global_batch_size] * plan.world_size
    passes = memory.largest_passes(whole) if memory is not None else no_limit
    kept = calibrations.names(plan, config)
    cached = calibrations.find(plan, config) if not policy.recalibrate else None
    if cached is None and (not policy.measures or config.trainer.fast_dev_run):
        known = [] if policy.recalibrate else calibrations.known_devices(plan, config)
        return begun_with(plan, known, caps) if known else plan
    if cached is None:
        told = measure(plan, config, console)
        own, exchange = [DeviceCalibration.from_dict(one) for one in told["devices"]], told["exchange"]
        measured_at = calibrations.store(plan, config, told)
    else:
        own, exchange, measured_at = list(cached.devices), cached.exchange.to_dict(), cached.measured_at
        plan = replace(plan, reasons=(cached.reason(), *plan.reasons))
    limits = zip(own, caps, passes, strict=True)
    devices = [device.capped(cap).in_passes(size or None) for device, cap, size in limits]
    try:
        choice = choose(plan, devices, Exchange.from_dict(exchange), policy.drop_slower)
    except ValueError as error:  # their memory together does not hold the batch
        raise ConfigError(
            must_be(
                "trainer.global_batch_size",
                "what the devices' memory holds",
                config.trainer.global_batch_size,
                f"{error}. A smaller trainer.microbatch_size needs less.",
            )
        ) from error
    source = {"measured_at": measured_at, "cached": cached is not None, "entries": kept}
    return replanned(plan, devices, exchange, choice, source)


def memory_of(plan: Plan, config: Config) -> RunMemory | None:
    """Return the estimates of a plan's ranks; none where only the CPU trains, or nobody wants them.

    Where only the CPU trains they take longer than a first small run does. The data set is built for them:
    `hardware.check_memory=false` does without.
    """
    if not config.hardware.check_memory or all(device.backend == "cpu" for device in plan.devices):
        return None
    from hetexp.core.instantiate import instantiate
    from hetexp.training.estimate import RunMemory

    strategy = instantiate(config.strategy)
    return RunMemory(config, plan.devices, plan.local_batch_sizes, plan.precisions, strategy)


def with_memory(plan: Plan, memory: RunMemory | None) -> Plan:
    """Return the plan with what each of its devices will hold.

    Raises:
        ConfigError: a device has less memory than it needs.
    """
    from dataclasses import replace

    if memory is None:
        return plan
    from hetexp.core.instantiate import instantiate

    counts = list(plan.local_batch_sizes)
    if instantiate(plan.config["balancing"]).follows:  # any device may get any part of the batch
        counts = [sum(counts)] * plan.world_size
    plan = with_microbatches(plan, memory.of(plan.devices, plan.local_batch_sizes, plan.precisions), counts)
    memory = memory.of(plan.devices, plan.local_batch_sizes, plan.precisions, plan.microbatch_sizes)
    problems = memory.problems()
    if problems:
        raise ConfigError(problems)
    needs = tuple(one.total_bytes if one is not None else None for one in memory.estimates)
    unknown = [f"The memory that it needs is not known: {memory.reason}."] if memory.reason else []
    return replace(plan, memory_bytes=needs, reasons=(*plan.reasons, *unknown))


def with_microbatches(plan: Plan, memory: RunMemory, counts: Sequence[int]) -> Plan:
    """Return the plan with several passes a step for each device that does not hold its samples in one.

    Args:
        memory: of the plan's devices.
        counts: the most samples that each of them may get.
    """
    from dataclasses import replace

    largest = memory.largest_passes(counts)
    before = plan.microbatch_sizes or (None,) * plan.world_size
    # 0 stands for a device that holds not even one sample: that is told as a problem.
    limits = [[n for n in pair if n] for pair in zip(before, largest, strict=True)]
    sizes = [min(pair, default=None) for pair in limits]
    reasons = [
        f"{device} takes its {samples} samples of a step in passes of at most {size}: its memory does not "
        "hold more."
        for device, samples, size in zip(plan.devices, plan.local_batch_sizes, sizes, strict=True)
        if size is not None and size < samples and plan.config["trainer"]["microbatch_size"] is None
    ]
    return replace(plan, microbatch_sizes=tuple(sizes), reasons=(*plan.reasons, *reasons))


def check(cfg: DictConfig, working_dir: Path) -> tuple[dict[str, Any], Config | None, Any, list[str]]:
    """Return the plain configuration, the typed one, the selected devices and all problems found.

    Args:
        working_dir: folder that relative paths start from.
    """
    from hetexp.core.config import COMPONENTS, check_config, for_devices
    from hetexp.core.instantiate import check_component
    from hetexp.hardware.selection import select_devices
    from hetexp.optimizer.build import check_optimizer
    from hetexp.plan.planner import check_plan

    raw, missing, problems = plain(cfg)
    config, found = check_config(raw)
    components = {key: check_component(key, raw[key]) for key in COMPONENTS if key in raw}
    found += [problem for one in components.values() for problem in one]
    if not components.get("optimizer", True):
        found += check_optimizer(raw["optimizer"])
    selection = None
    if config is not None:
        found += _check_run(config, working_dir)
        inventory = detect_for(config.hardware, working_dir)
        usable = not any(components.values())
        need = partial(need_bytes, config, inventory) if usable else None
        selection = select_devices(config.hardware, inventory, need)
        each, count = config.trainer.batch_size_per_device, len(selection.devices)
        config, raw = for_devices(config, raw, max(1, count))  # without a device nothing starts
        if each is not None:
            total = config.trainer.global_batch_size
            selection.reasons.append(f"A step takes {total} samples: {each} × {count} chosen devices.")
        found += check_plan(config, selection, not (components["strategy"] or components["balancing"]))
    # What is missing was told already; that null is no list, too, would be noise.
    problems += [p for p in found if not any(p.startswith(f"`{key}") for key in missing)]
    return raw, config, selection, problems


def plain(cfg: DictConfig) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the configuration as plain types, the keys that are missing, and what keeps it from being whole.

    A missing value and one that cannot be resolved is null in the result.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    cfg = cfg.copy()
    missing = sorted(_missing(cfg))
    problems = [f"`{key}` must be given, but is ??? (missing)." for key in missing]
    for key in missing:
        OmegaConf.update(cfg, key, None)
    while True:
        try:
            raw = OmegaConf.to_container(cfg, resolve=True)
            break
        except OmegaConfBaseException as error:
            if error.full_key is None or error.full_key in missing:
                raise
            first_line = str(error).partition("\n")[0]
            problems.append(
                f"`{error.full_key}` must be a value that can be resolved, but is not: {first_line}."
            )
            missing.append(error.full_key)
            OmegaConf.update(cfg, error.full_key, None)
    # Through JSON, so that what is checked is exactly what the plan will hold.
    plain_types: dict[str, Any] = json.loads(json.dumps(raw))
    return plain_types, missing, problems


def _missing(node: Any, key: str = "") -> Iterator[str]:
    """Yield the keys whose value is ???; unlike OmegaConf's own list, without resolving interpolations."""
    from omegaconf import DictConfig, ListConfig

    names: Sequence[Any] = list(node.keys()) if isinstance(node, DictConfig) else range(len(node))
    for name in names:
        child = node._get_node(name)
        path = f"{key}[{name!s}]" if isinstance(node, ListConfig) else f"{key}.{name!s}".lstrip(".")
        if child._is_missing():
            yield path
        elif isinstance(child, (DictConfig, ListConfig)) and not (
            child._is_interpolation() or child._is_none()
        ):
            yield from _missing(child, path)


def _check_run(config: Config, working_dir: Path) -> list[str]:
    """Check what names something outside the configuration: a loss to import, a checkpoint to read."""
    from hetexp.checkpoint.manifest import find_checkpoint
    from hetexp.training.loss import check_loss

    problems = check_loss(config.trainer.loss)
    if config.resume is not None:
        try:
            find_checkpoint(working_dir / config.resume)
        except ConfigError as error:
            problems += error.problems
        except HetexpError as error:
            problems.append(str(error))
    return problems


def need_bytes(config: Config, inventory: Inventory, count: int) -> int | None:
    """Return what the run needs on each of so many cards that share its batch evenly, `None` if not known."""
    from hetexp.core.instantiate import instantiate
    from hetexp.core.precision import choose_precisions
    from hetexp.training.estimate import RunMemory

    devices = [card.spec for card in inventory.cards][:1]
    if not devices:
        return None
    trainer = config.trainer
    local = trainer.batch_size_per_device or -(-trainer.global_batch_size // count)
    precisions = choose_precisions(trainer.precision, devices)
    (estimate,) = RunMemory(config, devices, [local], precisions, instantiate(config.strategy)).estimates
    return estimate.total_bytes if estimate is not None else None


def detect_for(hardware: HardwareConfig, working_dir: Path) -> Inventory:
    """Return the machine's cards, and who could drive and who uses them, as a configuration asks."""
    from hetexp.hardware.builds import known_builds, read_builds
    from hetexp.hardware.busy import who_is_busy
    from hetexp.hardware.detection import detect
    from hetexp.hardware.machine import Machine

    machine = Machine()
    named = [str(working_dir / entry.python) for entry in hardware.devices if entry.python is not None]
    builds = [*known_builds(), *read_builds(path for path in named if Path(path).is_file())]
    return detect(machine, builds, who_is_busy(machine, hardware.busy_memory_mib))
