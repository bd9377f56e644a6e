"""Sums over the ranks of one host through memory that they share, whatever their devices and builds of torch.

A tensor travels in chunks (`hetexp.comm.walk`). Large tensors of several ranks are summed by all of them,
each its part of every chunk, and each reads the others' parts of the result (a reduce-scatter and an
all-gather). Where there are two ranks, or the tensor is small, every rank reads all chunks and sums them
itself: half the meetings. Either way ranks' numbers are added in rank order, and every rank gets the same
bits.

On CUDA and ROCm devices the segment is page-locked, the copies run on streams of their own, and the sums are
computed on the device. Tensors on the host take the walk in C where it could be built, a large one in several
stripes at once, each through a channel of its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetexp.comm import native
from hetexp.comm.exchange import Exchange
from hetexp.comm.rendezvous import exchange
from hetexp.comm.segment import LINE_BYTES, Segment, Waiter, create
from hetexp.comm.walk import DEPTH, CudaLane, HostLane, Lane, Place, Walk
from hetexp.core.errors import PeerLostError, SetupError

HOST_CHUNK_BYTES = 2**20
"""Where all tensors are the host's: what is copied in is still in the cache when it is summed."""
DEVICE_CHUNK_BYTES = 2**21
"""Where a device takes part: each chunk costs a few launches and a look at the clock."""
SMALL_BYTES = 2**19
"""Tensors up to this size are summed by every rank for itself."""
STRIPE_BYTES = 2**21
"""Least part of a tensor that is worth a thread of its own."""
MOST_CHANNELS = 4
"""One or two threads a rank do not fill a large machine's memory channels, and more than this hardly gain."""
SPINS = 300
"""Looks at a counter before a rank sleeps, some 20 µs; where ranks outnumber cores it sleeps at once."""
TYPES = (torch.float32, torch.float64)
"""What the walk in C adds up."""


class SharedMemoryExchange(Exchange):
    """Sums over ranks of one host; made by `form`.

    Any mix of devices: the host's and CUDA's tensors directly, others by way of the host. A rank that dies is
    noticed by the others within a tenth of a second; after a `PeerLostError` the exchange is of no more use.

    Args:
        segment: mapped by all ranks.
        chunk_bytes: of a chunk and a slot; the same on every rank.
        channels: in which stripes of a tensor on the host travel at once; the same on every rank.
        device: whose runtime is to page-lock the segment, where it can.
    """

    name = "shm"

    def __init__(
        self, segment: Segment, chunk_bytes: int, channels: int, timeout_seconds: float, device: torch.device
    ) -> None:
        self.rank, self.size = segment.rank, segment.size
        self._segment, self._chunk_bytes = segment, chunk_bytes
        self._abandoned = 3 * self.size * channels
        self._waiter = Waiter(segment, self._abandoned, timeout_seconds)
        self._places = [Place(channel, self.size, chunk_bytes) for channel in range(channels)]
        self._walks = [Walk(segment, self._waiter, place) for place in self._places]
        self._host = HostLane()
        self._lane: Lane | None = None
        self._locked = device.type == "cuda" and _page_lock(segment)
        if self._locked:
            self._lane = CudaLane(device)
        self._native = native.library()
        self._channels = [self._channel(place, timeout_seconds) for place in self._places]
        self._threads = ThreadPoolExecutor(channels, "exchange") if channels > 1 else None

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
        able = {"device": device.type != "cpu", "native": native.library() is not None}
        everyone = exchange(store, "able", rank, size, able, timeout_seconds)
        on_host = not any(one["device"] for one in everyone)
        stripes = on_host and all(one["native"] for one in everyone)
        channels = max(1, min(MOST_CHANNELS, (os.cpu_count() or 1) // size)) if stripes else 1
        chunk_bytes = HOST_CHUNK_BYTES if on_host else DEVICE_CHUNK_BYTES
        num_words = 3 * size * channels + 1
        num_bytes = size * DEPTH * chunk_bytes * channels
        segment = _shared(store, rank, size, (num_words, num_bytes), timeout_seconds, named)
        return cls(segment, chunk_bytes, channels, timeout_seconds, device)

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
        flat = tensor.detach().view(-1)
        num_bytes, chunk = flat.numel() * flat.element_size(), self._chunk_bytes // flat.element_size()
        lane = self._lane_of(flat)
        in_parts = self.size > 2 and num_bytes > SMALL_BYTES
        with self._gives_up_on_error():
            if lane is self._host and self._native is not None and flat.dtype in TYPES:
                self._sum_in_c(flat, chunk, in_parts)
            elif self.size > 1:
                for walk, stripe in self._stripes(flat):
                    (walk.sum_in_parts if in_parts else walk.sum_alone)(lane, stripe, chunk)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.device.type not in ("cpu", "cuda"):
            return [one.to(tensor.device) for one in self.gather(tensor.to("cpu"))]
        tensor = tensor.contiguous()
        everyone = [tensor if r == self.rank else torch.empty_like(tensor) for r in range(self.size)]
        lane = self._lane_of(tensor)
        with self._gives_up_on_error():
            if lane is self._host and self._native is not None:
                self._gather_in_c(everyone)
            elif self.size > 1:
                stripes = [self._stripes(one) for one in everyone]
                for parts in zip(*stripes, strict=True):
                    parts[0][0].gather(lane, [part for _, part in parts], self._chunk_bytes)
        return everyone

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        if self._locked:
            self._locked = False
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._segment.address)
        for walk in self._walks:
            walk.forget()
        self._walks, self._channels, self._lane = [], [], None
        self._segment.close()

    def _lane_of(self, flat: torch.Tensor) -> Lane:
        return self._lane if flat.device.type == "cuda" and self._lane is not None else self._host

    def _stripes(self, flat: torch.Tensor) -> list[tuple[Walk, torch.Tensor]]:
        """Return the parts of a tensor that travel through a channel each."""
        count = min(len(self._walks), max(1, flat.numel() * flat.element_size() // STRIPE_BYTES))
        return list(zip(self._walks, flat.tensor_split(count), strict=False))

    def _sum_in_c(self, flat: torch.Tensor, chunk: int, in_parts: bool) -> None:
        assert self._native is not None
        summing = self._native.hetexp_sum

        def one(channel: native.Channel, walk: Walk, stripe: torch.Tensor) -> int:
            count, width = ctypes.c_int64(len(stripe)), stripe.element_size()
            data, number = ctypes.c_void_p(stripe.data_ptr()), ctypes.c_uint32(walk.chunks & 0xFFFFFFFF)
            walk.chunks += -(-len(stripe) // chunk)
            status: int = summing(
                ctypes.byref(channel), data, count, width, ctypes.c_int64(chunk), int(in_parts), number
            )
            return status

        self._in_c(one, self._stripes(flat))

    def _gather_in_c(self, everyone: Sequence[torch.Tensor]) -> None:
        assert self._native is not None
        gathering, chunk = self._native.hetexp_gather, self._chunk_bytes
        each = [[part for _, part in self._stripes(one)] for one in everyone]
        stripes = list(zip(self._walks, zip(*each, strict=True), strict=False))

        def one(channel: native.Channel, walk: Walk, stripe: Sequence[torch.Tensor]) -> int:
            own = stripe[self.rank]
            addresses = (ctypes.c_void_p * self.size)(*[part.data_ptr() for part in stripe])
            number = ctypes.c_uint32(walk.chunks & 0xFFFFFFFF)
            walk.chunks += -(-len(own) // chunk)
            status: int = gathering(
                ctypes.byref(channel),
                ctypes.c_void_p(own.data_ptr()),
                addresses,
                ctypes.c_int64(len(own)),
                ctypes.c_int64(chunk),
                number,
            )
            return status

        self._in_c(one, stripes)

    def _in_c(
        self, one: Callable[[native.Channel, Walk, Any], int], stripes: Sequence[tuple[Walk, Any]]
    ) -> None:
        """Let each stripe take its channel, several at once, and raise where a rank was lost."""
        if self.size == 1:
            return
        for walk, _ in stripes:
            walk.publish_read()
        calls = list(zip(self._channels, stripes, strict=False))
        if self._threads is None or len(calls) == 1:
            statuses = [one(channel, walk, stripe) for channel, (walk, stripe) in calls]
        else:
            begun = [self._threads.submit(one, channel, walk, part) for channel, (walk, part) in calls]
            statuses = [future.result() for future in begun]
        for status, (channel, _) in zip(statuses, calls, strict=True):
            if status == native.LATE:
                self._waiter.late(channel.lost)
            if status == native.GONE:
                self._waiter.lost(channel.lost)

    def _channel(self, place: Place, timeout_seconds: float) -> native.Channel:
        segment = self._segment
        crowded = (os.cpu_count() or 1) < self.size
        return native.Channel(
            words=segment.address + place.first_word * LINE_BYTES,
            abandoned=segment.address + self._abandoned * LINE_BYTES,
            slots=segment.data.data_ptr() + place.first_byte,
            rank_stride=DEPTH * self._chunk_bytes,
            slot_bytes=self._chunk_bytes,
            rank=self.rank,
            size=self.size,
            depth=DEPTH,
            file=segment.file,
            spins=0 if crowded else SPINS,
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


def _shared(
    store: dist.Store, rank: int, size: int, numbers: tuple[int, int], timeout_seconds: float, named: bool
) -> Segment:
    """Return the group's segment, made by its first rank and mapped by all.

    Args:
        numbers: of words, and of bytes beside them.
    """
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


def _page_lock(segment: Segment) -> bool:
    """Return whether the runtime has page-locked the segment; else its copies go by way of memory that is."""
    try:
        return int(torch.cuda.cudart().cudaHostRegister(segment.address, segment.num_bytes, 1)) == 0
    except RuntimeError:
        return False
