"""Sums over the ranks of one host through memory that they share, whatever their devices and builds of torch.

A tensor travels in chunks (`hetexp.comm.walk`). Large tensors of several ranks are summed by all of them,
each its part of every chunk, and each reads the others' parts of the result (a reduce-scatter and an
all-gather). Where there are two ranks, or the tensor is small, every rank reads all chunks and sums them
itself: half the meetings. Either way ranks' numbers are added in rank order, and every rank gets the same
bits.

On CUDA and ROCm devices the segment is page-locked and the copies run on streams of their own; the device
sums, but where processes share it the host does. Tensors on the host take the walk in C where it could be
built, with several threads where there are cores for them, each with a channel of its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetexp.comm import native
from hetexp.comm.exchange import Exchange
from hetexp.comm.rendezvous import exchange
from hetexp.comm.segment import LINE_BYTES, Segment, Waiter, create
from hetexp.comm.walk import DEPTH, SUMMED_IN_C, Channel, CudaLane, HostLane, Lane, Place, Walk
from hetexp.core.errors import PeerLostError, SetupError

HOST_CHUNK_BYTES = 2**20
"""Of a chunk at most, where all tensors are the host's: what is copied in is still in the cache when it is
summed."""
DEVICE_CHUNK_BYTES = 2**22
"""Where a device takes part: each chunk costs a few launches and a look at the clock."""
MIXED_CHUNK_BYTES = 2**21
"""Where devices and the host do: the host's threads have a chunk each."""
SHARED_CARD_CHUNK_BYTES = 2**23
"""Where ranks share a card, which takes its time to turn from one process to another."""
LEAST_CHUNK_BYTES, SHARED_CARD_LEAST_BYTES = 2**18, 2**21
PIECES, SHARED_CARD_PIECES = 6, 3
PAGE = 2**12
SMALL_BYTES = 2**19
"""Tensors up to this size are summed by every rank for itself."""
MOST_CHANNELS = 4
"""One or two threads a rank do not fill a large machine's memory, and more than this hardly gain."""
SPINS, MANY_SPINS = 300, 2000
"""Looks at a counter before a rank sleeps: some 20 µs, or 100 µs where each rank has several cores. Waking up
takes longer than most waits do. Where ranks outnumber cores a rank sleeps at once."""


@dataclass(frozen=True)
class Shape:
    """What all ranks of an exchange must do alike; each finds it from what all have told."""

    size: int
    """Ranks."""
    channels: int
    slot_bytes: int
    alone_bytes: int
    """Tensors up to this size are summed by every rank for itself, larger ones in parts."""
    pieces: int
    """Chunks that a tensor is cut into, unless that makes them too large or small: some travel at once."""
    least_bytes: int
    """Of a chunk, unless the tensor is smaller."""
    shared_cards: bool
    """Whether several ranks share a card."""

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]]) -> Shape:
        """Return the shape for ranks that have told their `device`'s type, `card`, `cores` and `native`."""
        cards = [one["card"] for one in ranks if one["card"]]
        shared = len(set(cards)) < len(cards)
        on_host = [one for one in ranks if one["device"] == "cpu"]
        cores = min(one["cores"] for one in ranks)
        threads = 1 if not on_host or not all(one["native"] for one in on_host) else cores // len(ranks)
        if len(on_host) == len(ranks):
            slot_bytes = HOST_CHUNK_BYTES
        else:
            slot_bytes = MIXED_CHUNK_BYTES if on_host else DEVICE_CHUNK_BYTES
        alone = SMALL_BYTES if shared or len(ranks) > 2 else sys.maxsize
        return cls(
            size=len(ranks),
            channels=max(1, min(MOST_CHANNELS, threads)),
            slot_bytes=SHARED_CARD_CHUNK_BYTES if shared else slot_bytes,
            alone_bytes=alone,
            pieces=SHARED_CARD_PIECES if shared else PIECES,
            least_bytes=SHARED_CARD_LEAST_BYTES if shared else LEAST_CHUNK_BYTES,
            shared_cards=shared,
        )

    @property
    def num_words(self) -> int:
        """Counters of all channels, and one by which a rank tells that it gives up."""
        return 3 * self.size * self.channels + 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.size * DEPTH * self.slot_bytes * self.channels

    def chunk_bytes(self, num_bytes: int) -> int:
        """Return the size of the chunks of a tensor."""
        if self.channels == 1 and self.slot_bytes == HOST_CHUNK_BYTES:
            return self.slot_bytes
        wanted = -(-num_bytes // max(PIECES, 2 * self.channels))
        return min(
            self.slot_bytes, max(LEAST_CHUNK_BYTES, -(-wanted // LEAST_CHUNK_BYTES) * LEAST_CHUNK_BYTES)
        )


class SharedMemoryExchange(Exchange):
    """Sums over ranks of one host; made by `form`.

    Any mix of devices: the host's and CUDA's tensors directly, others by way of the host. A rank that dies is
    noticed by the others within a tenth of a second; after a `PeerLostError` the exchange is of no more use.

    Args:
        segment: mapped by all ranks.
        device: whose runtime is to page-lock the segment, where it can.
    """

    name = "shm"

    def __init__(self, segment: Segment, shape: Shape, timeout_seconds: float, device: torch.device) -> None:
        self.rank, self.size = segment.rank, segment.size
        self._segment, self._shape = segment, shape
        self._waiter = Waiter(segment, shape.num_words - 1, timeout_seconds)
        places = [Place(channel, self.size, shape.slot_bytes) for channel in range(shape.channels)]
        self._native = native.library()
        known = [None if self._native is None else self._for_c(place, timeout_seconds) for place in places]
        self._channels = [
            Channel(segment, self._waiter, place, in_c) for place, in_c in zip(places, known, strict=True)
        ]
        self._walk = Walk(self.rank, self.size, self._channels)
        self._host = HostLane()
        self._lane: Lane | None = None
        self._locked = device.type == "cuda" and _page_lock(segment)
        if self._locked:
            self._lane = CudaLane(device, shape.shared_cards)
        self._threads = ThreadPoolExecutor(shape.channels, "exchange") if shape.channels > 1 else None

    @classmethod
    def form(
        cls,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_seconds: float,
        device: torch.device,
        named: bool = False,
    ) -> SharedMemoryExchange:
        """Make the exchange of a group; all its ranks call it.

        Args:
            store: of this group alone.
            rank: place in the group.
            device: the rank's own.
            named: put the segment into a file for as long as it takes all ranks to open it, even where memory
                without a name can be had.

        Raises:
            SetupError: a rank could not have or map the memory; on every rank, with its reason.
            HandshakeError: a rank did not come.
        """
        mine = {
            "device": device.type,
            "card": _card(device),
            "cores": os.cpu_count() or 1,
            "native": native.library() is not None,
        }
        shape = Shape.of(exchange(store, "able", rank, size, mine, timeout_seconds))
        return cls(_shared(store, rank, shape, timeout_seconds, named), shape, timeout_seconds, device)

    @property
    def page_locked(self) -> bool:
        """Whether the device copies to and from the segment by itself."""
        return self._locked

    @property
    def num_bytes(self) -> int:
        """What the ranks share, however large the tensors are."""
        return self._segment.num_bytes

    def sum_(self, tensor: torch.Tensor) -> None:
        if tensor.device.type not in ("cpu", "cuda"):
            staged = tensor.to("cpu")
            self.sum_(staged)
            tensor.copy_(staged)
            return
        if self.size == 1:
            return
        flat = tensor.detach().view(-1)
        lane, num_bytes = self._lane_of(flat), flat.numel() * flat.element_size()
        length = self._shape.chunk_bytes(num_bytes) // flat.element_size()
        in_parts = num_bytes > self._shape.alone_bytes
        with self._gives_up_on_error():
            if lane is self._host and self._native is not None and flat.dtype in SUMMED_IN_C:
                self._sum_in_c(flat, length, in_parts)
            else:
                (self._walk.sum_in_parts if in_parts else self._walk.sum_alone)(lane, flat, length)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.device.type not in ("cpu", "cuda"):
            return [one.to(tensor.device) for one in self.gather(tensor.to("cpu"))]
        tensor = tensor.contiguous()
        everyone = [tensor if r == self.rank else torch.empty_like(tensor) for r in range(self.size)]
        if self.size == 1:
            return everyone
        lane, length = self._lane_of(tensor), self._shape.chunk_bytes(len(tensor))
        with self._gives_up_on_error():
            if lane is self._host and self._native is not None:
                self._gather_in_c(everyone, length)
            else:
                self._walk.gather(lane, everyone, length)
        return everyone

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        if self._locked:
            self._locked = False
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._segment.address)
        self._walk.forget()
        self._lane = None
        self._segment.close()

    def _lane_of(self, flat: torch.Tensor) -> Lane:
        return self._lane if flat.device.type == "cuda" and self._lane is not None else self._host

    def _sum_in_c(self, flat: torch.Tensor, length: int, in_parts: bool) -> None:
        assert self._native is not None
        summing, data = self._native.hetexp_sum, ctypes.c_void_p(flat.data_ptr())
        count, width, chunk = ctypes.c_int64(len(flat)), flat.element_size(), ctypes.c_int64(length)

        def one(channel: native.Channel, number: int) -> int:
            first = ctypes.c_uint32(number & 0xFFFFFFFF)
            status: int = summing(ctypes.byref(channel), data, count, width, chunk, int(in_parts), first)
            return status

        self._in_c(one, -(-len(flat) // length))

    def _gather_in_c(self, everyone: Sequence[torch.Tensor], length: int) -> None:
        assert self._native is not None
        own = everyone[self.rank]
        gathering, data = self._native.hetexp_gather, ctypes.c_void_p(own.data_ptr())
        addresses = (ctypes.c_void_p * self.size)(*[one.data_ptr() for one in everyone])
        count, chunk = ctypes.c_int64(len(own)), ctypes.c_int64(length)

        def one(channel: native.Channel, number: int) -> int:
            first = ctypes.c_uint32(number & 0xFFFFFFFF)
            status: int = gathering(ctypes.byref(channel), data, addresses, count, chunk, first)
            return status

        self._in_c(one, -(-len(own) // length))

    def _in_c(self, one: Callable[[native.Channel, int], int], num_chunks: int) -> None:
        """Let each channel take its chunks, all at once, and raise where a rank was lost.

        Args:
            one: takes a channel, and the number of its first chunk.
        """
        self._walk.publish_read()
        calls = []
        used = self._channels[:num_chunks]
        for position, channel in enumerate(used):
            assert channel.in_c is not None
            calls.append((channel.in_c, channel.chunks))
            channel.chunks += -(-(num_chunks - position) // len(self._channels))
        if self._threads is None or len(calls) == 1:
            statuses = [one(*call) for call in calls]
        else:
            others = [self._threads.submit(one, *call) for call in calls[1:]]
            statuses = [one(*calls[0]), *(future.result() for future in others)]
        for status, channel, (in_c, _) in zip(statuses, used, calls, strict=True):
            channel.judge(status, in_c)

    def _for_c(self, place: Place, timeout_seconds: float) -> native.Channel:
        segment, shape, cores = self._segment, self._shape, os.cpu_count() or 1
        return native.Channel(
            words=segment.address + place.first_word * LINE_BYTES,
            abandoned=segment.address + (shape.num_words - 1) * LINE_BYTES,
            slots=segment.data.data_ptr() + place.first_byte,
            rank_stride=DEPTH * shape.slot_bytes,
            slot_bytes=shape.slot_bytes,
            rank=self.rank,
            size=self.size,
            depth=DEPTH,
            file=segment.file,
            spins=0 if cores < self.size else SPINS if cores < 2 * self.size else MANY_SPINS,
            first=place.channel,
            every=shape.channels,
            lost=-1,
            timeout_seconds=timeout_seconds,
        )

    @contextmanager
    def _gives_up_on_error(self) -> Iterator[None]:
        """Let no other rank wait for one that failed."""
        try:
            self._waiter.check()
            yield
        except BaseException as error:
            if not isinstance(error, PeerLostError):
                self._waiter.give_up()
            raise


def _shared(store: dist.Store, rank: int, shape: Shape, timeout_seconds: float, named: bool) -> Segment:
    """Return the group's segment, made by its first rank and mapped by all."""
    size, numbers = shape.size, (shape.num_words, shape.num_bytes)
    file, path, problem = -1, "", ""
    if rank == 0:
        try:
            file, path = create(Segment.total_bytes(*numbers), named)
        except SetupError as error:
            problem = str(error)
    told = exchange(store, "segment", rank, size, {"path": path, "problem": problem}, timeout_seconds)[0]
    segment: Segment | None = None
    if not told["problem"]:
        try:
            file = file if rank == 0 else os.open(told["path"], os.O_RDWR | os.O_CLOEXEC)
            segment = Segment(file, rank, size, *numbers)
        except OSError as error:
            problem = f"the exchange's memory could not be mapped ({error})"
    everyone = exchange(store, "mapped", rank, size, {"problem": problem}, timeout_seconds)
    if rank == 0 and path and not path.startswith("/proc/"):
        Path(path).unlink()
    # Nobody goes on before the name is gone: whoever looks for old segments would lose its lock on this one.
    exchange(store, "unnamed", rank, size, {}, timeout_seconds)
    problems = [f"rank {r}: {one['problem']}" for r, one in enumerate(everyone) if one["problem"]]
    if problems or segment is None:
        if segment is not None:
            segment.close()
        raise SetupError("; ".join(problems))
    return segment


def _card(device: torch.device) -> str | None:
    """Return what tells a rank's card from others; `None` for what is no card of CUDA or ROCm."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def _page_lock(segment: Segment) -> bool:
    """Return whether the runtime has page-locked the segment; else its copies go by way of memory that is."""
    try:
        return int(torch.cuda.cudart().cudaHostRegister(segment.address, segment.num_bytes, 1)) == 0
    except RuntimeError:
        return False
