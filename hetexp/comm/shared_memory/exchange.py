"""Sums over the ranks of one host through shared memory, whatever their devices and builds of torch.

A tensor travels in chunks (`hetexp.comm.shared_memory.chunked_copy`). For a large tensor each rank sums its
part of every chunk, and reads the other parts of the result (a reduce-scatter and an all-gather). If the
tensor is small, or two CPU ranks exchange, every rank reads all chunks and sums them itself, with half the
synchronisations. Either way the ranks' numbers are added in rank order, and all ranks get the same bits.

If a compiler built the C library, it copies with several threads, as far as there are cores, each with its
own channel. The segment is page-locked for CUDA and ROCm devices: the device copies to and from it, and the
host adds up. Without the library one thread copies in Python, and the device adds up.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from hetexp.comm import native
from hetexp.comm.exchange import Exchange
from hetexp.comm.rendezvous import all_gather_json
from hetexp.comm.shared_memory.chunked_copy import (
    DEPTH,
    SUMMED_IN_C,
    Channel,
    ChunkedCopy,
    CopyStream,
    CudaCopyStream,
    HostCopyStream,
    Place,
)
from hetexp.comm.shared_memory.segment import LINE_BYTES, Segment, Waiter, create
from hetexp.core.errors import PeerLostError, SetupError

HOST_CHUNK_BYTES = 2**20
"""Size of a chunk if one thread sums host tensors: the chunk is still in the cache after the copy."""
CHUNK_BYTES = 2**21
"""Largest chunk otherwise."""
SMALL_BYTES = 2**19
"""Tensors up to this size are one chunk, and every rank sums them itself."""
CHUNKS, CHUNKS_A_CHANNEL = 4, 2
"""Least number of chunks of a tensor, unless they would be too small: several travel at once."""
ROW_BYTES = 2**16
"""Size of a chunk of an exchange for small tensors alone."""
PAGE_BYTES = 2**12
MOST_CHANNELS = 4
"""One or two threads a rank do not use a large machine's whole memory bandwidth; more hardly help."""
SHARED_CHANNELS, SHARED_BYTES = 2, 2**24
"""Most channels if ranks share a card, whose copies take turns; tensors up to this size use one channel."""
SPINS, MANY_SPINS = 300, 2000
"""Polls of a counter before a rank sleeps: some 20 µs, or 100 µs if each rank has several cores. To wake up
takes longer than most waits. If ranks outnumber cores, a rank sleeps at once."""

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """The settings that all ranks of an exchange derive alike from the facts that they report."""

    size: int
    """Ranks."""
    channels: int
    slot_bytes: int
    alone_bytes: int
    """Every rank sums tensors up to this size itself; larger ones are summed in parts."""
    shared: bool = False
    """Whether two ranks drive one card."""

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]]) -> Shape:
        """Return the shape for ranks that report their `device`'s type, `card`, `cores` and `native`."""
        size, cores = len(ranks), min(rank["cores"] for rank in ranks)
        on_host = all(rank["device"] == "cpu" for rank in ranks)
        # A thread that waits for a device's copy keeps a core busy, and the ranks have other work, too.
        threads = cores // size if on_host else cores // (2 * size)
        channels = max(1, min(MOST_CHANNELS, threads)) if all(rank["native"] for rank in ranks) else 1
        alone = sys.maxsize if on_host and size == 2 else SMALL_BYTES
        slot = HOST_CHUNK_BYTES if on_host and channels == 1 else CHUNK_BYTES
        cards = [rank["card"] for rank in ranks if rank.get("card")]
        return cls(size, channels, slot, alone, shared=len(set(cards)) < len(cards))

    @classmethod
    def of_small(cls, size: int) -> Shape:
        """Return the shape for small tensors of the host."""
        return cls(size, channels=1, slot_bytes=ROW_BYTES, alone_bytes=sys.maxsize)

    @property
    def num_words(self) -> int:
        """Counters of all channels, and one for a rank that gives up."""
        return 3 * self.size * self.channels + 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.size * DEPTH * self.slot_bytes * self.channels

    def used_channels(self, num_bytes: int) -> int:
        """Return the number of channels for a tensor."""
        if not self.shared:
            return self.channels
        return min(self.channels, 1 if num_bytes <= SHARED_BYTES else SHARED_CHANNELS)

    def chunk_bytes(self, num_bytes: int) -> int:
        """Return the size of the chunks of a tensor."""
        if self.slot_bytes == HOST_CHUNK_BYTES:
            return self.slot_bytes
        even = -(-num_bytes // max(CHUNKS, CHUNKS_A_CHANNEL * self.used_channels(num_bytes)))
        return min(self.slot_bytes, max(SMALL_BYTES, -(-even // PAGE_BYTES) * PAGE_BYTES))


class DeviceInC:
    """A channel's streams and events of a device, as a structure for the C library."""

    def __init__(self, device: torch.device, calls: Sequence[int]) -> None:
        self._streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
        self._events = [torch.cuda.Event() for _ in range(2 * DEPTH + 1)]
        for event in self._events:
            event.record(self._streams[0])  # before that it has no handle
        ready, *handles = [event.cuda_event for event in self._events]
        self._scratch = torch.empty(SMALL_BYTES, dtype=torch.uint8, pin_memory=True)
        self._struct = native.Device(
            *calls,
            ready=ready,
            out=self._streams[0].cuda_stream,
            back_in=self._streams[1].cuda_stream,
            left=(ctypes.c_void_p * native.MOST_DEPTH)(*handles[:DEPTH]),
            back=(ctypes.c_void_p * native.MOST_DEPTH)(*handles[DEPTH:]),
            scratch=self._scratch.data_ptr(),
            index=device.index if device.index is not None else torch.cuda.current_device(),
        )
        self.address = ctypes.addressof(self._struct)

    def begin(self, device: torch.device) -> None:
        """Let the copies wait for the present work of the current stream."""
        self._events[0].record(torch.cuda.current_stream(device))


class SharedMemoryExchange(Exchange):
    """Sums over ranks of one host; made by `form`.

    Devices may be mixed: CPU and CUDA tensors are copied directly, others through the host. The ranks notice
    within a tenth of a second that one of them has died. After a `PeerLostError` the exchange cannot be used.

    Args:
        segment: mapped by all ranks.
        device: its runtime page-locks the segment if it can.
    """

    name = "shm"

    def __init__(self, segment: Segment, shape: Shape, timeout_seconds: float, device: torch.device) -> None:
        self.rank, self.size = segment.rank, segment.size
        self._segment, self._shape = segment, shape
        self._waiter = Waiter(segment, shape.num_words - 1, timeout_seconds)
        places = [Place(channel, self.size, shape.slot_bytes) for channel in range(shape.channels)]
        self._native = native.library()
        self._channels = [
            Channel(
                segment,
                self._waiter,
                place,
                None if self._native is None else self._for_c(place, timeout_seconds),
            )
            for place in places
        ]
        self._pool: int | None = None
        """The C library's threads, one a channel but the first."""
        if self._native is not None and shape.channels > 1:
            self._pool = self._native.hetexp_pool(shape.channels - 1)
        self._copy = ChunkedCopy(self.rank, self.size, self._channels)
        self._host = HostCopyStream()
        self._device_stream: CopyStream | None = None
        self._on_device: list[DeviceInC] = []
        self._locked = device.type == "cuda" and _page_lock(segment)
        if self._locked:
            self._device_stream = CudaCopyStream(device)
            self._on_device = self._devices_for_c(device)

    @classmethod
    def form(
        cls,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_seconds: float,
        device: torch.device,
        named: bool = False,
        small: bool = False,
    ) -> SharedMemoryExchange:
        """Make the exchange of a group; all its ranks call it.

        Args:
            store: of this group alone.
            rank: place in the group.
            device: the rank's own.
            named: whether to put the segment into a file until all ranks have opened it, even if the system
                has memory without a name.
            small: whether only small tensors of the host will be exchanged: half a MiB for two ranks.

        Raises:
            SetupError: a rank could not reserve or map the memory; on every rank, with its reason.
            HandshakeError: a rank did not come.
        """
        if small:
            shape = Shape.of_small(size)
            return cls(_shared(store, rank, shape, timeout_seconds, named), shape, timeout_seconds, HOST)
        facts = {
            "device": device.type,
            "card": _card(device),
            "cores": os.cpu_count() or 1,
            "native": native.library() is not None,
        }
        shape = Shape.of(all_gather_json(store, "able", rank, size, facts, timeout_seconds))
        return cls(_shared(store, rank, shape, timeout_seconds, named), shape, timeout_seconds, device)

    @property
    def page_locked(self) -> bool:
        """Whether the device itself copies to and from the segment."""
        return self._locked

    @property
    def num_bytes(self) -> int:
        """Size of the shared memory, however large the tensors are."""
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
        copy_stream, num_bytes = self._copy_stream_of(flat), flat.numel() * flat.element_size()
        length = self._shape.chunk_bytes(num_bytes) // flat.element_size()
        in_parts = num_bytes > self._shape.alone_bytes
        self._copy.used = self._shape.used_channels(num_bytes)
        with self._gives_up_on_error():
            if self._goes_in_c(copy_stream) and flat.dtype in SUMMED_IN_C:
                self._sum_in_c(flat, length, in_parts)
            else:
                (self._copy.sum_in_parts if in_parts else self._copy.sum_alone)(copy_stream, flat, length)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.device.type not in ("cpu", "cuda"):
            return [part.to(tensor.device) for part in self.gather(tensor.to("cpu"))]
        tensor = tensor.contiguous()
        gathered = [tensor if r == self.rank else torch.empty_like(tensor) for r in range(self.size)]
        if self.size == 1:
            return gathered
        copy_stream, length = self._copy_stream_of(tensor), self._shape.chunk_bytes(len(tensor))
        self._copy.used = self._shape.used_channels(len(tensor))
        with self._gives_up_on_error():
            if self._goes_in_c(copy_stream):
                addresses = [part.data_ptr() for part in gathered]
                self._gather_in_c(addresses, len(tensor), length, tensor.device)
            else:
                self._copy.gather(copy_stream, gathered, length)
        return gathered

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Return every rank's row [length] of host numbers as one tensor [size, length].

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """
        rows, num_bytes = row.new_empty(self.size, row.numel()), row.numel() * row.element_size()
        rows[self.rank] = row
        length = self._shape.chunk_bytes(num_bytes)
        self._copy.used = 1
        with self._gives_up_on_error():
            if self._native is not None:
                first = rows.data_ptr()
                self._gather_in_c([first + rank * num_bytes for rank in range(self.size)], num_bytes, length)
            else:
                self._copy.gather(self._host, rows.view(torch.uint8).unbind(), length)
        return rows

    def abandon(self) -> None:
        if self._segment.file >= 0:
            self._waiter.give_up()

    def close(self) -> None:
        if self._locked:
            self._locked = False
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._segment.address)
        if self._native is not None and self._pool is not None:
            self._native.hetexp_end_pool(ctypes.c_void_p(self._pool))
            self._pool = None
        self._copy.forget()
        self._device_stream, self._on_device = None, []
        self._segment.close()

    def _copy_stream_of(self, flat: torch.Tensor) -> CopyStream:
        return (
            self._device_stream
            if flat.device.type == "cuda" and self._device_stream is not None
            else self._host
        )

    def _goes_in_c(self, copy_stream: CopyStream) -> bool:
        return self._native is not None and (copy_stream is self._host or bool(self._on_device))

    def _sum_in_c(self, flat: torch.Tensor, length: int, in_parts: bool) -> None:
        call = native.Call(
            data=flat.data_ptr(),
            count=flat.numel(),
            chunk=length,
            width=flat.element_size(),
            in_parts=in_parts,
        )
        self._in_c(call, flat.device)

    def _gather_in_c(
        self, parts: Sequence[int], num_bytes: int, length: int, device: torch.device = HOST
    ) -> None:
        """Fill the other ranks' parts, of which each is given by its address."""
        addresses = (ctypes.c_void_p * self.size)(*parts)
        call = native.Call(
            data=parts[self.rank], everyone=ctypes.addressof(addresses), count=num_bytes, chunk=length
        )
        self._in_c(call, device)

    def _in_c(self, call: native.Call, device: torch.device) -> None:
        """Let all channels copy their chunks in parallel; raise if a rank was lost.

        Args:
            call: with the fields that are the same for each channel.
        """
        assert self._native is not None
        self._copy.publish_read()
        num_chunks, every = -(-call.count // call.chunk), self._copy.used
        if device.type == "cpu" and min(num_chunks, every) == 1:
            self._in_this_thread(call, num_chunks, every)
            return
        used = self._channels[: min(num_chunks, every)]
        calls = (native.Call * len(used))()
        for position, (channel_call, channel) in enumerate(zip(calls, used, strict=True)):
            ctypes.memmove(ctypes.addressof(channel_call), ctypes.addressof(call), ctypes.sizeof(native.Call))
            in_c = cast(native.Channel, channel.in_c)
            in_c.every = every
            channel_call.channel = ctypes.addressof(in_c)
            channel_call.number = channel.chunks & 0xFFFFFFFF
            channel.chunks += -(-(num_chunks - position) // every)
            if device.type != "cpu":
                self._on_device[position].begin(device)
                channel_call.device = self._on_device[position].address
        self._native.hetexp_take(ctypes.c_void_p(self._pool), calls, len(used))
        for channel_call, channel in zip(calls, used, strict=True):
            channel.judge(channel_call.status)

    def _in_this_thread(self, call: native.Call, num_chunks: int, every: int) -> None:
        """Let the first channel copy a host tensor, without a copy of the call for others."""
        assert self._native is not None
        channel = self._channels[0]
        in_c = cast(native.Channel, channel.in_c)
        in_c.every = every
        call.channel = ctypes.addressof(in_c)
        call.number = channel.chunks & 0xFFFFFFFF
        channel.chunks += -(-num_chunks // every)
        self._native.hetexp_take(None, ctypes.byref(call), 1)
        channel.judge(call.status)

    def _devices_for_c(self, device: torch.device) -> list[DeviceInC]:
        """Return the device structure of each channel for the C library; none without the runtime."""
        if self._native is None:
            return []
        calls = native.runtime_calls(torch.version.hip, torch.version.cuda)
        return [] if calls is None else [DeviceInC(device, calls) for _ in self._channels]

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
        """Let the other ranks fail, too, if this rank fails in the block."""
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
    first = all_gather_json(
        store, "segment", rank, size, {"path": path, "problem": problem}, timeout_seconds
    )[0]
    segment: Segment | None = None
    if not first["problem"]:
        try:
            file = file if rank == 0 else os.open(first["path"], os.O_RDWR | os.O_CLOEXEC)
            segment = Segment(file, rank, size, *numbers)
        except OSError as error:
            problem = f"the exchange's memory could not be mapped ({error})"
    reports = all_gather_json(store, "mapped", rank, size, {"problem": problem}, timeout_seconds)
    if rank == 0 and path and not path.startswith("/proc/"):
        Path(path).unlink()
    # All ranks wait until the name is deleted: one that looks for old segments would lose its lock on this
    # one.
    all_gather_json(store, "unnamed", rank, size, {}, timeout_seconds)
    problems = [f"rank {r}: {report['problem']}" for r, report in enumerate(reports) if report["problem"]]
    if problems or segment is None:
        if segment is not None:
            segment.close()
        raise SetupError("; ".join(problems))
    return segment


def _card(device: torch.device) -> str | None:
    """Return the unique name of a CUDA or ROCm card on the host, `None` if it is unknown."""
    if device.type != "cuda":
        return None
    unique = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if unique is None else str(unique)


def _page_lock(segment: Segment) -> bool:
    """Return whether the runtime has page-locked the segment; otherwise its copies are staged."""
    try:
        return int(torch.cuda.cudart().cudaHostRegister(segment.address, segment.num_bytes, 1)) == 0
    except RuntimeError:
        return False
