"""Makes the plan of a run from devices, strategy and policy, and checks that it can be made."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from hetexp.core.compose.conf_folders import import_paths
from hetexp.core.config import Config
from hetexp.core.config.trainer import how_it_ends
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, must_be
from hetexp.core.fault import LASTING
from hetexp.core.plan import Plan
from hetexp.core.precision import choose_precisions, precision_problems, precision_reasons
from hetexp.core.split import apportion
from hetexp.core.topology import Topology
from hetexp.hardware.selection.devices import threads_for
from hetexp.plan.exchange_checks import check_collective, check_variables
from hetexp.plan.fallback import with_hint
from hetexp.plan.routes import routed
from hetexp.plan.run_spec import Request, RunSpec
from hetexp.plan.strategy import Strategy

_DEFAULT_FOLDER = re.compile(r"\d\d-\d\d-\d\d-[0-9a-f]{6}")


def check_plan(spec: RunSpec, components: bool = True) -> list[str]:
    """Return the problems with this configuration on these devices.

    Args:
        components: whether `strategy` and `balancing` have passed their own checks and may be built.
    """
    config, selection = spec.config, spec.selection
    problems, devices = list(selection.problems), selection.devices
    problems += precision_problems(config.trainer.precision, devices)
    problems += check_variables(config)
    problems += check_collective(config, devices)
    problems += _check_faults(config, devices)
    if components and devices:
        try:
            strategy = spec.strategy
            problems += [with_hint(problem, strategy, config) for problem in strategy.check(config, devices)]
            problems += _check_compile(config, strategy, devices)
            problems += strategy.check_exchange(config)
        except ConfigError as error:
            problems += error.problems
        try:
            policy = spec.policy
            if not selection.problems:
                policy.shares(devices, choose_precisions(config.trainer.precision, devices))
        except ConfigError as error:
            problems += error.problems
    return problems


def make_plan(spec: RunSpec) -> Plan:
    """Return the plan of a run without problems by `check_plan`."""
    config, selection, request = spec.config, spec.selection, spec.request
    strategy, policy, devices = spec.strategy, spec.policy, selection.devices
    precisions = choose_precisions(config.trainer.precision, devices)
    shares = policy.shares(devices, precisions)
    local = apportion(config.trainer.global_batch_size, shares).counts
    policy_name = type(policy).__name__.lower()
    split = ", ".join(f"{device.id} {count}" for device, count in zip(devices, local, strict=True))
    if request.script is None:
        policy_reason = f"splits {config.trainer.global_batch_size} samples a step: {split}."
    else:
        parts = ", ".join(f"{device.id} {share:.1%}" for device, share in zip(devices, shares, strict=True))
        policy_reason = f"splits each batch of {request.script.name}: {parts}."
    reasons = [
        *selection.reasons,
        f"Policy {policy_name} {policy_reason}",
        *precision_reasons(config.trainer.precision, devices),
        *(_training_reasons(config) if request.script is None else ()),
    ]
    plan = Plan(
        run_id=run_id(request.run_dir),
        run_dir=str(request.run_dir),
        name=config.name or run_name(request),
        group=request.group,
        config=spec.raw,
        devices=tuple(devices),
        strategy=strategy.name,
        shares=shares,
        local_batch_sizes=local,
        collective_backend="gloo",
        route=Topology() if strategy.all_reduces() else None,
        threads=selection.threads
        if len(selection.threads) == len(devices)
        else threads_for(devices, config.hardware.threads_per_rank, loaders=config.trainer.num_workers),
        choices=request.choices | ({"strategy": strategy.name} if selection.fallback else {}),
        overrides=request.overrides,
        precisions=precisions,
        reasons=tuple(reasons),
        exact=strategy.exact and config.debug.exchange and config.comm.wire == "float32",
        fallback=selection.fallback,
        network=selection.network.model_dump() if selection.network is not None else None,
        script=str(request.script.absolute()) if request.script is not None else None,
        script_arguments=request.script_arguments,
        working_dir=str(request.working_dir),
        import_paths=import_paths(request.working_dir),
    )
    return routed(plan)


def _training_reasons(config: Config) -> list[str]:
    """Return sentences about the learning rate that follows the batch, and about what ends the run."""
    trainer, rate = config.trainer, config.optimizer.get("lr")
    reasons = []
    if trainer.lr_batch_size is not None and isinstance(rate, (int, float)):
        ratio = f"{trainer.global_batch_size}/{trainer.lr_batch_size}"
        factor = f"√({ratio})" if trainer.lr_scaling == "sqrt" else ratio
        scaled = f"{rate * trainer.lr_factor:.6g} = {rate:g} × {factor}"
        reasons.append(f"The learning rate is {scaled} (trainer.lr_batch_size).")
    return [*reasons, how_it_ends(trainer)]


def run_id(run_dir: Path) -> str:
    """Return a unique id, made of the run folder's name."""
    parts = run_dir.parts[-2:] if _DEFAULT_FOLDER.fullmatch(run_dir.name) else run_dir.parts[-3:]
    text = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(parts)).strip("-")
    unique = any(_DEFAULT_FOLDER.fullmatch(part) for part in parts)
    short = text[-40:].strip("-")
    return short if unique and short else f"{short or 'run'}-{secrets.token_hex(3)}"


def run_name(request: Request) -> str:
    """Return a name made of the typed overrides, or of the run's options."""
    typed = [text for text in request.overrides if not text.startswith("hydra.")]
    if typed:
        return ",".join(typed)
    keys = ("hardware", "strategy", "balancing", "model", "data")
    return " ".join(request.choices[key] for key in keys if request.choices.get(key))


def _check_faults(config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
    ids = [device.id for device in devices]
    return [
        must_be(f"fault.events[{position}].device", f"one of {', '.join(ids)}", event.device)
        for position, event in enumerate(config.fault.events)
        if ids and event.device not in ids
    ]


def _check_compile(config: Config, strategy: Strategy, devices: Sequence[DeviceSpec]) -> list[str]:
    """Return the problem with a compiled model, in which hooks of the emulation do not run."""
    mode = config.trainer.compile
    if mode is False:
        return []
    if not strategy.compiles:
        return [must_be("trainer.compile", f"false where `strategy` is {strategy.name}", mode)]
    lasting = {event.device for event in config.fault.events if event.kind in LASTING}
    altered = [str(device) for device in devices if device.emulated or device.id in lasting]
    if not altered:
        return []
    accepted = f"false where devices are emulated, slowed or limited in memory ({', '.join(altered)})"
    return [must_be("trainer.compile", accepted, mode)]
