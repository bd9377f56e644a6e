"""The states of the random numbers of Python, NumPy and torch in a checkpoint.

One file of integers and bytes holds the states of all ranks. A run that resumes on the same kinds of devices
in the same order draws the same numbers (dropout masks, augmentations) as one that was never interrupted. On
other devices each state goes to a device of its kind, if there is one.
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
from hetexp.data.streams.random_numbers import random_states as host_states
from hetexp.hardware.backend import ACCELERATORS

if TYPE_CHECKING:
    from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

FILE = "random.safetensors"
_NAMED = 6
"""Most devices that a warning lists."""


@dataclass(frozen=True)
class Origin:
    """The device and the generators of a rank's states."""

    device: str
    """Its id in the plan, such as `cuda:1`."""
    kind: str | None
    """Backend of its card; `None` if the rank has no card."""
    python: tuple[int, float | None]
    """Version of the generator's state, and its second normal number."""
    numpy: tuple[int, int, float]
    """Position, and whether there is a second normal number, which follows."""
    num_cards: int


def random_files(state: TrainState) -> dict[str, bytes]:
    """Return the file of all ranks' states by its name, on the group's first rank; all ranks call it."""
    contents = _all_gather_bytes(state.engine.group, _pack(*local_states(state)))
    if state.engine.group.rank:
        return {}
    tensors: dict[str, Tensor] = {}
    origins = []
    for place, content in enumerate(contents):
        states, origin = _unpack(content)
        tensors |= {f"rank_{place}/{name}": value for name, value in states.items()}
        origins.append(origin)
    return {FILE: safetensors.torch.save(tensors, {"origins": json.dumps(origins)})}


def local_states(state: TrainState) -> tuple[dict[str, Tensor], Origin]:
    """Return the states of this process and of the cards that it drives, and their origin."""
    (version, words, second), legacy, host = state.random_states() or host_states()
    _, key, position, has_gauss, gauss = legacy
    cards = state.backend.random_states()
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(key.astype(np.int64)),
        "torch": host,
        **{f"card_{place}": value for place, value in enumerate(cards)},
    }
    spec = state.plan.devices[state.rank]
    origin = Origin(
        device=spec.id,
        kind=_kind(spec.backend),
        python=(version, second),
        numpy=(int(position), int(has_gauss), float(gauss)),
        num_cards=len(cards),
    )
    return states, origin


def restore_random(state: TrainState, folder: Path) -> None:
    """Restore the random states of devices that the run still has; one warning names the others.

    Old checkpoints have no such file.
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
    saved = [origin["kind"] for origin in origins]
    host, cards = match_states(saved, [_kind(spec.backend) for spec in devices])
    _restore(state, tensors, origins, host[group.rank], cards[group.rank])
    if group.rank == 0:
        _warn(devices, origins, host, cards)


def match_states(
    saved: Sequence[str | None], now: Sequence[str | None]
) -> tuple[list[int | None], list[int | None]]:
    """Return for each rank the saved ranks whose host's and whose card's states it restores; `None`: none.

    Args:
        saved: kind of each saved rank's card; `None` for a CPU.
        now: kind of each present rank's card.
    """
    host = [rank if rank < len(saved) else None for rank in range(len(now))]
    left: dict[str | None, list[int]] = {}
    for place, kind in enumerate(saved):
        left.setdefault(kind, []).append(place)
    cards = [left[kind].pop(0) if kind is not None and left.get(kind) else None for kind in now]
    return host, cards


def _restore(
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


def _warn(
    devices: Sequence[DeviceSpec],
    origins: list[dict[str, Any]],
    host: list[int | None],
    cards: list[int | None],
) -> None:
    """Warn once, for all ranks, of states that are lost, and of devices that begin with their seed."""
    lost = [saved["device"] for place, saved in enumerate(origins) if saved["kind"] and place not in cards]
    lost += [f"the process of {saved['device']}" for place, saved in enumerate(origins) if place not in host]
    fresh = [
        spec.id
        for spec, process, card in zip(devices, host, cards, strict=True)
        if process is None or (_kind(spec.backend) is not None and card is None)
    ]
    if not lost and not fresh:
        return
    changes = [f"those of {_list(lost)} are lost, since the run has no such device now"] if lost else []
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


def _all_gather_bytes(communicator: Communicator, content: bytes) -> list[bytes]:
    padded, lengths = padded_bytes(communicator, content)
    contents = communicator.all_gather(padded)
    return [part[:length].numpy().tobytes() for part, length in zip(contents, lengths, strict=True)]


def padded_bytes(communicator: Communicator, content: bytes) -> tuple[Tensor, list[int]]:
    """Return this rank's bytes [longest] uint8, filled up with zeros, and the length of every rank's."""
    sizes = torch.zeros(communicator.world_size, dtype=torch.int64)
    sizes[communicator.rank] = len(content)
    lengths = communicator.all_reduce(sizes).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return padded, lengths
