"""The stages of a run whose strategy cuts the model, and the plan that has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.config import Config
from hetexp.core.instantiate import instantiate
from hetexp.core.plan import Plan
from hetexp.core.stage import Layer
from hetexp.launch.prepare.known import known_of
from hetexp.plan.routes import routed
from hetexp.plan.stages.arrange import Arrangement, arrange

if TYPE_CHECKING:
    from hetexp.training.measuring.estimate import RunMemory


def arranged(
    plan: Plan, config: Config, layers: Sequence[Layer] | None = None, built: RunMemory | None = None
) -> Arrangement:
    """Return which of a plan's devices gets which layers and samples.

    Args:
        layers: of the model; counted here where they are not given.
        built: holds the run's model and a sample; built here where it is not given.

    Raises:
        ConfigError: the model may not be cut, or its stages do not fit the devices.
    """
    from hetexp.training.measuring.estimate import RunMemory

    policy: BalancingPolicy = instantiate(config.balancing)
    strategy = instantiate(config.strategy)
    if built is None:
        built = RunMemory(config, plan.devices, plan.local_batch_sizes, plan.precisions, strategy)
    if layers is None:
        layers = layers_of(plan, config, built)
    known = known_of(plan, config, built) if policy.measures or policy.follows else None
    return arrange(plan, strategy, policy, layers, known, config.hardware.check_memory)


def layers_of(plan: Plan, config: Config, built: RunMemory) -> tuple[Layer, ...]:
    """Return the layers of the run's model, in the precision that most ranks compute in.

    Raises:
        ConfigError: the model may not be cut.
    """
    from hetexp.training.measuring.layers import describe_layers

    ((precision, _),) = Counter(plan.precisions or ["float32"]).most_common(1)
    return describe_layers(config, built, precision, emulated=plan.paced)


def with_arrangement(plan: Plan, found: Arrangement) -> Plan:
    """Return the plan of the devices that take part, in the order of their ranks, with their stages."""

    def kept(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[device] for device in found.ranks) if values else ()

    # The policy's own sentence tells of samples that are each device's: here they are a pipeline's.
    old = [reason for reason in plan.reasons if not reason.startswith("Policy ")]
    changed = replace(
        plan,
        devices=kept(plan.devices),
        left_out=tuple(one for place, one in enumerate(plan.devices) if place not in found.ranks),
        threads=kept(plan.threads),
        precisions=kept(plan.precisions),
        microbatch_sizes=(),
        stages=found.stages,
        replica_batch_sizes=found.replica_batch_sizes,
        shares=found.shares,
        local_batch_sizes=found.local_batch_sizes,
        memory_bytes=found.memory_bytes,
        predicted_step_seconds=found.step_seconds,
        reasons=(*found.reasons, *old),
    )
    return routed(changed)
