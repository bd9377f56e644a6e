"""What machines report before they train together, and the differences that keep them from it."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import TypeAdapter, ValidationError

import hetexp
from hetexp.core.device import DeviceSpec
from hetexp.core.section import flatten
from hetexp.hosts.channel import WireError

MAX_SHOWN = 6
"""Most differing keys that a message lists."""
LOCAL_KEYS = ("node", "cluster.token_file")
"""Keys that may differ between machines."""


@dataclass(frozen=True)
class HostFacts:
    """The devices, the configuration and the software of a machine."""

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
    """Of its clock when the facts were made or sent, in seconds since the epoch."""

    @classmethod
    def of_this_machine(
        cls, name: str, devices: Sequence[DeviceSpec], threads: Sequence[int], config: Mapping[str, Any]
    ) -> HostFacts:
        """Return the facts of this machine."""
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "missing"
        shared = {key: value for key, value in flatten(config).items() if key not in LOCAL_KEYS}
        python = platform.python_version()
        return cls(
            name, tuple(devices), tuple(threads), shared, hetexp.__version__, torch, python, time.time()
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> HostFacts:
        """Read the result of `to_dict`, maybe of a machine with another version.

        Raises:
            WireError: it is something else.
        """
        try:
            facts = TypeAdapter(cls).validate_python(raw)
            json.dumps({**raw, "config": None}, ensure_ascii=False).encode()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise WireError(f"facts that cannot be read ({where}: {first['msg']})") from None
        except UnicodeEncodeError:  # half a character, which no terminal shows
            raise WireError("facts that are no Unicode text") from None
        if len(facts.devices) != len(facts.threads) or not facts.devices:
            raise WireError("facts without devices")
        return facts


def differences(leader: HostFacts, other: HostFacts, other_time: float, limit_seconds: float) -> list[str]:
    """Return why two machines cannot train together.

    Args:
        other_time: the leader's clock when the facts of the other machine arrived.
        limit_seconds: largest difference between the clocks.
    """
    a, b = leader.name, other.name
    if other.hetexp != leader.hetexp:  # the rest may have another meaning there
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
    if not abs(skew) <= limit_seconds:  # NaN is no time
        way = "ahead of" if skew > 0 else "behind"
        problems.append(
            f"The clock of {b} is {abs(skew):.0f} s {way} that of {a}, and {limit_seconds:g} s are the most "
            "(cluster.clock_skew_seconds): set it (timedatectl set-ntp true)."
        )
    ours, theirs = leader.config, other.config
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
    differing = [f"`{key}` is {_shown(ours, key)} on {a} and {_shown(theirs, key)} on {b}" for key in keys]
    if differing:
        more = f" and {len(differing) - MAX_SHOWN} more keys differ" if len(differing) > MAX_SHOWN else ""
        problems.append(f"Both must have the same configuration: {', '.join(differing[:MAX_SHOWN])}{more}.")
    return problems


def _release(text: str) -> str:
    """Return `2.13` for `2.13.0+cu130`."""
    return ".".join(text.partition("+")[0].split(".")[:2])


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "absent"
