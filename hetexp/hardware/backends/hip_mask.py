"""Reads the variables that hide AMD's cards as ROCm does: ROCr's first, then HIP's on the remaining cards.

ROCr: BuildUsrDeviceList in ROCR-Runtime's amd_filter_device.cpp. HIP: Device::init in clr's rocdevice.cpp and
https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html. Two things differ, so that no card is used
that the user wanted hidden: an empty list hides all cards from HIP, too; and beside NVIDIA's cards
CUDA_VISIBLE_DEVICES, which is meant for those, hides AMD's without complaint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hetexp.hardware.backends.kfd import Node

ROCR = "ROCR_VISIBLE_DEVICES"
HIP = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""The first that is set counts."""
_END = re.compile(r"-[0-9]+")
"""An entry that ends a list without a mistake; alone it hides all cards."""


def hidden(
    nodes: Sequence[Node], environ: Mapping[str, str], nvidia_too: bool
) -> tuple[dict[str, str], list[str]]:
    """Return the cards that the variables hide.

    Args:
        nodes: ROCm's list in ROCr's order.
        environ: environment of the launcher.
        nvidia_too: whether the machine has NVIDIA's cards as well.

    Returns:
        Address of each hidden card → the variable that hides it, `HIP_VISIBLE_DEVICES=1`; and the mistakes
        in the variables.
    """
    by: dict[str, str] = {}
    problems: list[str] = []
    left = list(nodes)
    earlier: str | None = None
    for variable in (ROCR, next((name for name in HIP if name in environ), None)):
        if variable is None or variable not in environ:
            continue
        value = environ[variable]
        visible, wrong = _named(left, value)
        by |= {node.address: f"{variable}={value}" for node in left if node not in visible}
        if wrong is not None and not (nvidia_too and variable == "CUDA_VISIBLE_DEVICES"):
            whole = f" ({value!r})" if "," in value else ""
            fix = " Set one of the two variables only." if earlier is not None else ""
            problems.append(f"`{variable}` must {_accepted(len(left), earlier)}, but {wrong}{whole}.{fix}")
        left = visible
        earlier = f"{variable}={value}"
    return by, problems


def _named(nodes: Sequence[Node], value: str) -> tuple[list[Node], str | None]:
    """Return the cards that a list names, in its order, and its mistake.

    As in the runtimes, the list ends at the first entry that names no card, or a card for the second time.
    """
    visible: list[Node] = []
    entries = [part.strip() for part in value.split(",")]
    while entries and not entries[-1]:
        entries.pop()
    for entry in entries:
        if _END.fullmatch(entry):
            break
        if entry.isascii() and entry.isdecimal():
            place = int(entry) if len(entry) < 10 else len(nodes)
            named = list(nodes[place : place + 1])
        else:
            named = _with_uuid(nodes, entry)
        if not named:
            return visible, f"names {entry!r}"
        if len(named) > 1:
            return visible, f"{entry!r} begins the UUIDs of {len(named)}"
        if named[0] in visible:
            return visible, f"names one twice by {entry!r}"
        visible += named
    return visible, None


def _with_uuid(nodes: Sequence[Node], entry: str) -> list[Node]:
    """Return the cards whose UUID begins so; `GPU-` alone names none."""
    folded = entry.casefold()
    if len(folded) < 5 or not folded.startswith("gpu-"):
        return []
    return [node for node in nodes if node.uuid is not None and node.uuid.casefold().startswith(folded)]


def _accepted(count: int, earlier: str | None) -> str:
    """Return what the variable must name.

    Args:
        earlier: the variable that was applied before it, with its value.
    """
    whose = f"the cards that {earlier} leaves" if earlier is not None else "AMD cards of this machine"
    if count == 0:
        return f"name {whose}, which are none"
    numbers = "0, the only one's number," if count == 1 else f"number (0 to {count - 1})"
    return f"name {whose} by {numbers} or UUID, each once"
