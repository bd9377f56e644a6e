"""What becomes of a run whose strategy cannot run here: an error, or what `strategy.fallback` asks for."""

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
    """Return the run on the fastest of its devices alone, if the strategy refuses them.

    Without `strategy.fallback`, and if nothing speaks against the strategy, the run stays as it is. The
    global batch is the same: one device takes all of it. If `single` itself was asked for with several
    devices, this chooses the device and is no fallback.

    Args:
        spec: with components that passed their own checks.
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
    # The policy may be of several devices' weights, and one device has nothing to share.
    return spec.with_values(strategy=SINGLE, balancing=EQUAL).replaced(selection=alone)


def with_hint(problem: str, strategy: Strategy, config: Config) -> str:
    """Return what speaks against a strategy, with the way out that a person may not know.

    Where one of the strategy's own options is wrong the problem says what to write instead.
    """
    if config.fallback is not None or not problem.startswith("`strategy` "):
        return problem
    return f"{problem} {strategy.fallback_hint()}".rstrip()


def fastest(devices: Sequence[DeviceSpec], precisions: Sequence[str]) -> tuple[DeviceSpec, str]:
    """Return the device that promises most, and by what it was chosen."""

    def promise(pair: tuple[DeviceSpec, str]) -> tuple[bool, float]:
        device, precision = pair
        return device.vendor != "cpu", (known_rate(device, precision) or 0.0) / device.slow

    pairs = list(zip(devices, precisions, strict=True))
    best, _ = max(pairs, key=promise)  # the first of equal ones
    if len(devices) == 1:
        return best, "the only device"
    if all(known_rate(device, precision) is not None for device, precision in pairs):
        return best, "the fastest by the catalogue's rates"
    return best, "the first of those that the catalogue knows as fastest, cards before the CPU"
