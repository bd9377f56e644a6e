"""Checks of the group `comm` of a configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import must_be
from hetexp.hardware.backend import VISIBILITY
from hetexp.plan.routes import choose_collective

OTHER_JOBS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of another engine's job, which are removed from the environment of ranks."""
SET_BY_HETEXP = {
    **dict.fromkeys(OTHER_JOBS, "Ranks meet through the launcher."),
    **dict.fromkeys(VISIBILITY, "`hardware.gpu_ids` chooses cards."),
    "OMP_NUM_THREADS": "`hardware.threads_per_rank` sets it.",
    "PYTHONPATH": "`python` of an entry of `hardware.devices` chooses an interpreter.",
    "PYTHONUNBUFFERED": "The launcher follows the logs.",
}
"""Variables that the launcher sets for each rank → what to do instead."""


def check_collective(config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
    """Return the problem with a vendor's own library on these devices."""
    if config.comm.backend != "native" or not devices or choose_collective("native", devices) != "gloo":
        return []
    names = ", ".join(str(device) for device in devices)
    return [must_be("comm.backend", f"auto, shm or gloo for these devices ({names})", "native")]


def check_wire(config: Config) -> list[str]:
    """Return the problem with `comm.wire` of a strategy that compresses gradients."""
    wire = config.comm.wire
    return [float64_problem(wire)] if wire != "float32" and config.trainer.precision == "float64" else []


def refuse_wire(config: Config, strategy: str, fix: str = "ddp and hybrid code them.") -> list[str]:
    """Return the problem with `comm.wire` of a strategy that does not compress gradients.

    Args:
        strategy: its name.
        fix: what to do instead.
    """
    wire = config.comm.wire
    if wire == "float32":
        return []
    return [must_be("comm.wire", f"float32 where `strategy` is {strategy}", wire, fix)]


def check_boundary_wire(config: Config) -> list[str]:
    """Return the problem with `comm.boundary_wire` of a strategy with stages."""
    wire = config.comm.boundary_wire
    if wire == "float32" or config.trainer.precision != "float64":
        return []
    return [float64_problem(wire, "comm.boundary_wire")]


def refuse_boundary_wire(config: Config, strategy: str) -> list[str]:
    """Return the problem with `comm.boundary_wire` of a strategy without stages."""
    wire = config.comm.boundary_wire
    if wire == "float32":
        return []
    fix = "pipeline and hybrid have stages."
    return [must_be("comm.boundary_wire", f"float32 where `strategy` is {strategy}", wire, fix)]


def require_exchange(config: Config, strategy: str) -> list[str]:
    """Return the problem with `debug.exchange` of a strategy whose steps need the exchange."""
    if config.debug.exchange:
        return []
    return [must_be("debug.exchange", f"true where `strategy` is {strategy}", False)]


def float64_problem(wire: str, key: str = "comm.wire") -> str:
    """Return the problem with compression in a run in float64."""
    return must_be(key, "float32 (numbers as they are) where training is in float64", wire)


def check_variables(config: Config) -> list[str]:
    """Return the problems with `comm.env`."""
    problems = []
    for name, value in (config.comm.env or {}).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            problems.append(
                f"`comm.env` must have names of letters, digits and `_`, but has '{name}' instead."
            )
        elif name in SET_BY_HETEXP or name.startswith("HETEXP_"):
            fix = SET_BY_HETEXP.get(name, "It is between the launcher and its ranks.")
            problems.append(must_be(f"comm.env.{name}", "absent, as hetexp sets it", value, fix))
        elif "\0" in value:
            problems.append(must_be(f"comm.env.{name}", "a text without a null character", value))
    return problems
