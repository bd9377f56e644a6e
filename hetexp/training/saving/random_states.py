"""The states of the random numbers of Python, NumPy and torch in a checkpoint.

The states of all ranks are in one file of integers and bytes. A run that goes on with the same kinds of
devices in the same order draws the same numbers as one that was never interrupted: dropout masks,
augmentations. Elsewhere each state goes where there is such a device.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from hetexp.comm.communicator import Communicator
from hetexp.core.device import DeviceSpec
from hetexp.hardware.backend import ACCELERATORS

if TYPE_CHECKING:
    from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

FILE = "random.safetensors"
_NAMED = 6
"""Most states that a warning lists."""


@dataclass(frozen=True)
class Origin:
    """Whose states these are."""

    device: str
    """Its id in the plan, such as `cuda:1`."""
    kind: str | None
    """Backend of its card; `None` where the processor drew all numbers."""
    python: tuple[int, float | None]
    """Version of the generator's state, and its second normal number."""
    numpy: tuple[int, int, float]
    """Position, and whether there is a second normal number, which follows."""
    num_cards: int


def random_files(state: TrainState) -> dict[str, bytes]:
    """Return the file of all ranks' states by its name, on the group's first rank; nothing elsewhere.

    All ranks call it.
    """
    mine = _pack(*own_states(state))
    everyone = _gathered(state.engine.group, mine)
    if state.engine.group.rank:
        return {}
    tensors: dict[str, Tensor] = {}
    origins = []
    for place, content in enumerate(everyone):
        states, origin = _unpack(content)
        tensors |= {f"rank_{place}/{name}": value for name, value in states.items()}
        origins.append(origin)
    return {FILE: safetensors.torch.save(tensors, {"origins": json.dumps(origins)})}


def own_states(state: TrainState) -> tuple[dict[str, Tensor], Origin]:
    """Return the states of this process and of the cards that it drives, and whose they are."""
    version, words, second = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    cards = state.backend.random_states()
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "torch": torch.get_rng_state(),
        **{f"card_{place}": value for place, value in enumerate(cards)},
    }
    spec = state.plan.devices[state.rank]
    origin = Origin(
        device=spec.id,
        kind=_kind(spec.backend),
        python=(version, second),
        numpy=(int(legacy["state"]["pos"]), int(legacy["has_gauss"]), float(legacy["gauss"])),
        num_cards=len(cards),
    )
    return states, origin


def restore_random(state: TrainState, folder: Path) -> None:
    """Put random states back where there are such devices; else one warning names those that were left.

    A checkpoint of before they were saved has none.
    """
    path = folder / FILE
    if not path.is_file():
        return
    with safe_open(path, "pt", "cpu") as file:
        origins: list[dict[str, Any]] = json.loads(file.metadata()["origins"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    group = state.engine.group
    devices = state.plan.devices
    if group.world_size < len(devices):  # each rank has a file of its own
        devices = devices[state.rank : state.rank + 1]
    host, cards = match_states([one["kind"] for one in origins], [_kind(spec.backend) for spec in devices])
    _put_back(state, tensors, origins, host[group.rank], cards[group.rank])
    if group.rank == 0:
        _tell(devices, origins, host, cards)


def match_states(
    saved: Sequence[str | None], now: Sequence[str | None]
) -> tuple[list[int | None], list[int | None]]:
    """Return for each rank whose host's states, and whose card's, it goes on with; `None`: no rank's.

    Args:
        saved: kind of each rank's card at the time of the checkpoint; `None` for a processor.
        now: likewise.
    """
    host = [rank if rank < len(saved) else None for rank in range(len(now))]
    left: dict[str | None, list[int]] = {}
    for place, kind in enumerate(saved):
        left.setdefault(kind, []).append(place)
    cards = [left[kind].pop(0) if kind is not None and left.get(kind) else None for kind in now]
    return host, cards


def _put_back(
    state: TrainState,
    tensors: dict[str, Tensor],
    origins: list[dict[str, Any]],
    host: int | None,
    cards: int | None,
) -> None:
    if host is not None:
        origin = origins[host]
        version, second = origin["python"]
        random.setstate((version, tuple(tensors[f"rank_{host}/python"].tolist()), second))
        position, has_gauss, gauss = origin["numpy"]
        key = tensors[f"rank_{host}/numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, position, has_gauss, gauss))
        torch.set_rng_state(tensors[f"rank_{host}/torch"])
    if cards is not None and _kind(state.plan.devices[state.rank].backend) == origins[cards]["kind"]:
        states = [tensors[f"rank_{cards}/card_{place}"] for place in range(origins[cards]["num_cards"])]
        state.backend.set_random_states(states)


def _tell(
    devices: Sequence[DeviceSpec],
    origins: list[dict[str, Any]],
    host: list[int | None],
    cards: list[int | None],
) -> None:
    """Warn once, for all ranks, of states that are lost, and of devices that begin with their seed."""
    lost = [one["device"] for place, one in enumerate(origins) if one["kind"] and place not in cards]
    lost += [f"the process of {one['device']}" for place, one in enumerate(origins) if place not in host]
    fresh = [
        spec.id
        for spec, process, card in zip(devices, host, cards, strict=True)
        if process is None or (_kind(spec.backend) is not None and card is None)
    ]
    if not lost and not fresh:
        return
    changes = [f"those of {_list(lost)} are left, there is no such device now"] if lost else []
    changes += [f"{_list(fresh)} begin with their seeds"] if fresh else []
    log.warning(
        "resume: random states of other devices: %s. Dropout and augmentations draw other numbers than they "
        "would have.",
        "; ".join(changes),
    )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _kind(backend: str) -> str | None:
    return backend if backend in ACCELERATORS else None


def _pack(states: dict[str, Tensor], origin: Origin) -> bytes:
    return bytes(safetensors.torch.save(states, {"origin": json.dumps(asdict(origin))}))


def _unpack(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return safetensors.torch.load(content), json.loads(header["__metadata__"]["origin"])


def _gathered(communicator: Communicator, mine: bytes) -> list[bytes]:
    """Return every rank's bytes, on every rank: they are few."""
    sizes = torch.zeros(communicator.world_size, dtype=torch.int64)
    sizes[communicator.rank] = len(mine)
    lengths = communicator.all_reduce(sizes).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyone = communicator.all_gather(padded)
    return [one[:n].numpy().tobytes() for one, n in zip(everyone, lengths, strict=True)]
