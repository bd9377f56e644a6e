"""`strategy.fallback`: the fastest device trains alone if the strategy cannot run on the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetexp.balancing.tflops import known_rate
from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.core.precision import choose_precisions
from hetexp.plan.run_spec import RunSpec
from hetexp.plan.strategy import Strategy

SINGLE = {"_target_": "hetexp.strategy.single.Single"}
EQUAL = {"_target_": "hetexp.balancing.equal.Equal"}


def fall_back(spec: RunSpec) -> RunSpec:
    """Return the run on the fastest of its devices alone, if the strategy refuses the devices.

    Without `strategy.fallback`, or if the strategy can run, the run stays as it is. The one device takes the
    whole global batch. If the strategy is `single` with several devices, this only chooses the device.

    Args:
        spec: its classes have passed their own checks.
    """
    config, selection, devices = spec.config, spec.selection, spec.selection.devices
    if config.fallback is None or not devices or selection.problems:
        return spec
    try:
        strategy = spec.strategy
        problems = strategy.check(config, devices)
    except ConfigError:  # reported by the plan's own check
        return spec
    if not problems:
        return spec
    device, how = fastest(devices, choose_precisions(config.trainer.precision, devices))
    reason = " ".join(problems)
    fallback = strategy.fallback_from(reason)
    if fallback is None:
        note = f"strategy.fallback=single: of {len(devices)} devices {device} trains alone, {how}."
    else:
        note = f"strategy.fallback=single: {strategy.name} cannot run. {reason} {device} trains alone, {how}."
    alone = replace(
        selection, devices=[device], reasons=[*selection.reasons, note], network=None, fallback=fallback
    )
    # One device has nothing to share, and the policy may have weights of several devices.
    return spec.with_values(strategy=SINGLE, balancing=EQUAL).replaced(selection=alone)


def with_hint(problem: str, strategy: Strategy, config: Config) -> str:
    """Return a problem with a strategy together with the hint about `strategy.fallback`.

    A problem with one of the strategy's own options gets no hint.
    """
    if config.fallback is not None or not problem.startswith("`strategy` "):
        return problem
    return f"{problem} {strategy.fallback_hint()}".rstrip()


def fastest(devices: Sequence[DeviceSpec], precisions: Sequence[str]) -> tuple[DeviceSpec, str]:
    """Return the device with the highest expected speed, and the reason for the choice."""

    def expected_speed(pair: tuple[DeviceSpec, str]) -> tuple[bool, float]:
        device, precision = pair
        return device.vendor != "cpu", (known_rate(device, precision) or 0.0) / device.slow

    pairs = list(zip(devices, precisions, strict=True))
    best, _ = max(pairs, key=expected_speed)  # of equal devices the first
    if len(devices) == 1:
        return best, "the only device"
    if all(known_rate(device, precision) is not None for device, precision in pairs):
        return best, "the fastest by the catalogue's rates"
    return best, "the first of those that the catalogue knows as fastest, cards before the CPU"
