"""What machines tell each other before they train together, and what keeps them from it."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import hetexp
from hetexp.cluster.wire import WireError
from hetexp.core.device import DeviceSpec

_SHOWN = 6
"""Most differing keys that are listed one by one."""
_OWN_KEYS = ("node", "cluster.token_file")
"""Keys that are each machine's own; all others must be the same on all."""


@dataclass(frozen=True)
class HostFacts:
    """What a machine brings along."""

    name: str
    devices: tuple[DeviceSpec, ...]
    threads: tuple[int, ...]
    """Of each device's rank."""
    config: dict[str, Any]
    """By dotted key."""
    hetexp: str
    torch: str
    """Of the launcher's interpreter; `DeviceSpec.torch` is that of a device's own."""
    python: str
    time: float
    """Of its clock when this was made or sent, in seconds since the epoch."""

    @classmethod
    def of_this_machine(
        cls, name: str, devices: Sequence[DeviceSpec], threads: Sequence[int], config: Mapping[str, Any]
    ) -> HostFacts:
        """Return what this machine brings."""
        return cls(
            name,
            tuple(devices),
            tuple(threads),
            {key: value for key, value in _flat(config).items() if key not in _OWN_KEYS},
            hetexp.__version__,
            _torch_version(),
            platform.python_version(),
            time.time(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> HostFacts:
        """Read what `to_dict` returned, on another machine maybe of another version.

        Raises:
            WireError: it is something else.
        """
        try:
            devices = tuple(DeviceSpec.from_dict(device) for device in raw["devices"])
            threads = tuple(int(one) for one in raw["threads"])
            facts = cls(
                name=str(raw["name"]),
                devices=devices,
                threads=threads,
                config=dict(raw["config"]),
                hetexp=str(raw["hetexp"]),
                torch=str(raw["torch"]),
                python=str(raw["python"]),
                time=float(raw["time"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"facts that cannot be read ({error})") from None
        if len(devices) != len(threads) or not devices:
            raise WireError("facts without devices")
        return facts


def differences(leader: HostFacts, other: HostFacts, other_time: float, limit_seconds: float) -> list[str]:
    """Return why two machines cannot train together; empty where they can.

    Args:
        other_time: the leader's clock when the other one's facts arrived.
        limit_seconds: most that the clocks may differ.
    """
    a, b = leader.name, other.name
    if other.hetexp != leader.hetexp:  # what the rest means is not known then
        return [
            f"hetexp is {leader.hetexp} on {a} and {other.hetexp} on {b}: install the same version on both."
        ]
    problems = []
    if _release(other.torch) != _release(leader.torch):
        problems.append(
            f"torch is {leader.torch} on {a} and {other.torch} on {b}: both need the same release "
            f"({_release(leader.torch)}), each the build for its own cards."
        )
    skew = other.time - other_time
    if abs(skew) > limit_seconds:
        way = "ahead of" if skew > 0 else "behind"
        problems.append(
            f"The clock of {b} is {abs(skew):.0f} s {way} that of {a}, and {limit_seconds:g} s are the most "
            "(cluster.clock_skew_seconds): set it (timedatectl set-ntp true)."
        )
    mine, theirs = leader.config, other.config
    keys = [key for key in dict.fromkeys([*mine, *theirs]) if mine.get(key) != theirs.get(key)]
    differing = [f"`{key}` is {_shown(mine, key)} on {a} and {_shown(theirs, key)} on {b}" for key in keys]
    if differing:
        more = f" and {len(differing) - _SHOWN} more keys differ" if len(differing) > _SHOWN else ""
        problems.append(f"Both must have the same configuration: {', '.join(differing[:_SHOWN])}{more}.")
    return problems


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "missing"


def _release(text: str) -> str:
    """Return `2.13` for `2.13.0+cu130`."""
    return ".".join(text.partition("+")[0].split(".")[:2])


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "absent"
