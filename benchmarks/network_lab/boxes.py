"""Boxes on one bridge: network namespaces with a shaped link each. Needs root, `ip` and `tc`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "hxlab"
SUBNET = "10.213.7"
MOST = 16
"""Boxes of a lab."""
_BURST, _LATENCY = "64kb", "100ms"


@dataclass(frozen=True)
class Box:
    """One namespace."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command inside."""
        return ["ip", "netns", "exec", self.name, *words]

    def sent_bytes(self) -> int:
        """Return the bytes that have left the box through its link so far."""
        text = _run(*self.command("cat", "/sys/class/net/eth0/statistics/tx_bytes"))
        return int(text)


def problem() -> str | None:
    """Return why no box can be made here, `None` where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it by sudo, or as root in a container with CAP_NET_ADMIN"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{', '.join(absent)} must be installed (Debian: iproute2)" if absent else None


@contextmanager
def boxes(count: int, mbit_per_second: float) -> Iterator[list[Box]]:
    """Give so many boxes whose links carry that much in each direction, and remove them at the end.

    What an earlier one has left that was killed is removed first.
    """
    remove()
    try:
        _run("ip", "link", "add", PREFIX, "type", "bridge")
        _run("ip", "link", "set", PREFIX, "up")
        yield [_made(number, mbit_per_second) for number in range(count)]
    finally:
        remove()


def remove() -> None:
    """Kill what runs in the lab's boxes, and remove them and the bridge."""
    for number in range(MOST):  # by themselves they go some time after their namespace
        if Path(f"/sys/class/net/{PREFIX}{number}").exists():
            _run("ip", "link", "delete", f"{PREFIX}{number}")
    listed = _run("ip", "netns", "list").split()
    for name in (word for word in listed if word.startswith(f"{PREFIX}-")):
        for pid in _run("ip", "netns", "pids", name).split():
            subprocess.run(["kill", "-9", pid], check=False, stderr=subprocess.DEVNULL)
        _run("ip", "netns", "delete", name)
    if Path(f"/sys/class/net/{PREFIX}").exists():
        _run("ip", "link", "delete", PREFIX)


def _made(number: int, mbit_per_second: float) -> Box:
    box, outer = Box(f"{PREFIX}-{number}", f"{SUBNET}.{number + 1}"), f"{PREFIX}{number}"
    _run("ip", "netns", "add", box.name)
    _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", box.name)
    _run("ip", "link", "set", outer, "master", PREFIX, "up")
    _run(*box.command("ip", "address", "add", f"{box.address}/24", "dev", "eth0"))
    for device in ("lo", "eth0"):
        _run(*box.command("ip", "link", "set", device, "up"))
    shape = ["rate", f"{mbit_per_second:g}mbit", "burst", _BURST, "latency", _LATENCY]
    _run("tc", "qdisc", "add", "dev", outer, "root", "tbf", *shape)  # to the box
    _run(*box.command("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *shape))  # and from it
    return box


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
