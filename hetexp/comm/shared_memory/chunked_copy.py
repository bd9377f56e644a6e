"""How a tensor is copied through shared memory, chunk by chunk (`hetexp.comm.shared_memory.exchange`).

Chunks take turns over one or more channels. In each channel a rank has `DEPTH` slots of a chunk, writes its
chunks into them one after another, and may reuse a slot once the others have read it. The ranks only exchange
counters of the chunks that each has written, summed and read. While one chunk is summed, the next leaves the
device and the one before comes back.

`shared_sum.c` copies in the same way for tensors on the host, with the same counters and slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetexp.comm import native
from hetexp.comm.shared_memory.segment import Segment, Waiter

DEPTH = 4
"""Slots of each rank in a channel. With fewer slots the ranks would deadlock."""
WRITTEN, SUMMED, READ = range(3)
SUMMED_IN_C = (torch.float32, torch.float64)
"""Types that the C library adds up."""


class CopyStream(Protocol):
    """How tensors of one kind of device get into the segment and out of it."""

    def leaving(self) -> AbstractContextManager[Any]:
        """Return the context for copies into the segment."""
        ...

    def coming(self) -> AbstractContextManager[Any]:
        """Return the context for copies out of it, and for sums."""
        ...

    def mark(self) -> Any:
        """Return a mark, for `wait`, of all work issued in the present context so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Return when the work before a mark is done."""
        ...

    def begin(self, several: bool) -> None:
        """Start with a tensor that the current stream has ready; several chunks may be under way at once."""
        ...

    def end(self) -> None:
        """Let the current stream have the result."""
        ...


class HostCopyStream:
    """Copies of CPU tensors, which are done when they are issued."""

    def leaving(self) -> AbstractContextManager[Any]:
        return nullcontext()

    coming = leaving

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return None

    def begin(self, several: bool) -> None:
        return None

    def end(self) -> None:
        return None


class CudaCopyStream:
    """Copies of tensors of a CUDA or ROCm device, whose runtime has page-locked the segment.

    Copies in and out run on separate streams: a card has an engine for each direction.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._several = False

    def leaving(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._out) if self._several else nullcontext()

    def coming(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._in) if self._several else nullcontext()

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def begin(self, several: bool) -> None:
        self._several = several
        if several:
            now = torch.cuda.current_stream(self._device)
            self._out.wait_stream(now)
            self._in.wait_stream(now)

    def end(self) -> None:
        if self._several:
            now = torch.cuda.current_stream(self._device)
            now.wait_stream(self._in)
            now.wait_stream(self._out)


@dataclass(frozen=True)
class Place:
    """Where a channel's counters and slots lie in the segment."""

    channel: int
    size: int
    """Ranks."""
    slot_bytes: int

    @property
    def first_word(self) -> int:
        return self.channel * 3 * self.size

    @property
    def first_byte(self) -> int:
        return self.channel * self.size * DEPTH * self.slot_bytes

    def slot(self, rank: int, turn: int) -> slice:
        """Return the bytes of a rank's slot."""
        start = self.first_byte + (rank * DEPTH + turn) * self.slot_bytes
        return slice(start, start + self.slot_bytes)


class Channel:
    """A channel's counters and slots, and this rank's number of chunks in it.

    Args:
        in_c: the channel's structure for the C library, if that is used.
    """

    def __init__(
        self, segment: Segment, waiter: Waiter, place: Place, in_c: native.Channel | None = None
    ) -> None:
        self._segment, self._waiter, self._place = segment, waiter, place
        self.in_c = in_c
        self._rank, self._size = segment.rank, segment.size
        data = segment.data
        self._slots = [[data[place.slot(rank, i)] for i in range(DEPTH)] for rank in range(self._size)]
        self.chunks = 0
        """Number of chunks begun so far, which is the number of the next one."""

    def slots(self, number: int, dtype: torch.dtype, length: int) -> list[torch.Tensor]:
        """Return all ranks' slots of a chunk, as `length` numbers of a type."""
        num_bytes = length * dtype.itemsize
        return [slots[number % DEPTH][:num_bytes].view(dtype) for slots in self._slots]

    def publish(self, what: int, number: int) -> None:
        """Publish that this rank has written, summed or read a chunk."""
        self._segment.publish(self._place.first_word + what * self._size + self._rank, number + 1)

    def wait(self, what: int, number: int) -> None:
        """Wait until all other ranks have written, summed or read a chunk; a number below 0 needs no wait."""
        if number < 0:
            return
        if self.in_c is not None:
            library = native.library()
            assert library is not None
            self.judge(
                library.hetexp_await(ctypes.byref(self.in_c), what, ctypes.c_uint32(number & 0xFFFFFFFF))
            )
            return
        for rank in range(self._size):
            if rank != self._rank:
                word = self._place.first_word + what * self._size + rank
                self._waiter.wait(word, (number + 1) & 0xFFFFFFFF, rank)

    def judge(self, status: int) -> None:
        """Raise the error of a call of the C library, if it failed.

        Raises:
            PeerLostError: a rank is gone or did not come in time.
            RuntimeError: the device's runtime refused a call.
        """
        if status == native.DONE or self.in_c is None:
            return
        lost = self.in_c.lost
        if status == native.LATE:
            self._waiter.late(lost)
        if status == native.GONE:
            self._waiter.lost(lost)
        raise RuntimeError(f"the device's runtime refused a copy to or from shared memory (error {lost})")

    def forget(self) -> None:
        """Drop all references to the segment's memory."""
        self._slots, self.in_c = [], None


@dataclass
class _Chunk:
    channel: Channel
    number: int
    """In its channel."""
    bounds: slice
    """In the tensor."""
    slots: list[torch.Tensor]
    """All ranks' slots, in the tensor's type."""
    mark: Any = None
    """Mark of its last work."""


class ChunkedCopy:
    """Copies tensors through the channels; every rank copies in the same order."""

    def __init__(self, rank: int, size: int, channels: Sequence[Channel]) -> None:
        self.rank, self.size, self._channels = rank, size, channels
        self.used = len(channels)
        """Number of channels for the next tensor."""
        self._unread: tuple[CopyStream, _Chunk] | None = None
        """The last chunk whose copies were issued; it is published as read once they are done."""

    def sum_alone(self, copy_stream: CopyStream, flat: torch.Tensor, length: int) -> None:
        """Let every rank read all ranks' chunks and add them up for itself.

        Args:
            length: numbers of a chunk.
        """

        def read(chunk: _Chunk) -> None:
            local = flat[chunk.bounds]
            add([local if r == self.rank else chunk.slots[r] for r in range(self.size)], local)

        self._each(copy_stream, flat, length, read)

    def gather(self, copy_stream: CopyStream, tensors: Sequence[torch.Tensor], length: int) -> None:
        """Fill `tensors`, one a rank, with those of the other ranks; this rank's is sent."""

        def read(chunk: _Chunk) -> None:
            for rank, tensor in enumerate(tensors):
                if rank != self.rank:
                    tensor[chunk.bounds].copy_(chunk.slots[rank], non_blocking=True)

        self._each(copy_stream, tensors[self.rank], length, read)

    def _each(
        self, copy_stream: CopyStream, flat: torch.Tensor, length: int, read: Callable[[_Chunk], None]
    ) -> None:
        """Write each chunk for all ranks, and call `read` with it once all ranks have written theirs."""
        chunks = self._chunks(flat, length)
        copy_stream.begin(len(chunks) > 1)
        for step in range(len(chunks) + 1):
            if step < len(chunks):
                self._write(copy_stream, flat, chunks[step], whole=True)
            if step >= 1:
                chunk = chunks[step - 1]
                self._done(copy_stream, chunk, WRITTEN)
                with copy_stream.coming():
                    read(chunk)
                    chunk.mark = copy_stream.mark()
                self._leave_unread(copy_stream, chunk)
        copy_stream.end()

    def sum_in_parts(self, copy_stream: CopyStream, flat: torch.Tensor, length: int) -> None:
        """Let every rank add up its part of each chunk, and read the sums of the other parts."""
        chunks = self._chunks(flat, length)
        copy_stream.begin(len(chunks) > 1)
        for step in range(len(chunks) + 2):
            if step < len(chunks):
                self._write(copy_stream, flat, chunks[step], whole=False)
            if 1 <= step <= len(chunks):
                chunk = chunks[step - 1]
                self._done(copy_stream, chunk, WRITTEN)
                self._sum_part(copy_stream, flat[chunk.bounds], chunk)
            if step >= 2:
                chunk = chunks[step - 2]
                self._done(copy_stream, chunk, SUMMED)
                self._read_parts(copy_stream, flat[chunk.bounds], chunk)
        copy_stream.end()

    def _chunks(self, flat: torch.Tensor, length: int) -> list[_Chunk]:
        """Cut a tensor into chunks, which take turns over the channels."""
        self.publish_read()
        chunks = []
        for position, start in enumerate(range(0, len(flat), length)):
            channel = self._channels[position % self.used]
            bounds = slice(start, min(start + length, len(flat)))
            number = channel.chunks
            channel.chunks += 1
            slots = channel.slots(number, flat.dtype, bounds.stop - start)
            chunks.append(_Chunk(channel, number, bounds, slots))
        return chunks

    def _write(self, copy_stream: CopyStream, flat: torch.Tensor, chunk: _Chunk, whole: bool) -> None:
        """Copy a chunk into this rank's slot: all of it, or the parts that other ranks add up."""
        chunk.channel.wait(READ, chunk.number - DEPTH)
        local, slot = flat[chunk.bounds], chunk.slots[self.rank]
        with copy_stream.leaving():
            if whole:
                slot.copy_(local, non_blocking=True)
            else:
                part = self._part(len(local), self.rank)
                for bounds in (slice(0, part.start), slice(part.stop, len(local))):
                    if bounds.stop > bounds.start:
                        slot[bounds].copy_(local[bounds], non_blocking=True)
            chunk.mark = copy_stream.mark()

    def _sum_part(self, copy_stream: CopyStream, local: torch.Tensor, chunk: _Chunk) -> None:
        part = self._part(len(local), self.rank)
        result = chunk.slots[self.rank][part]
        with copy_stream.coming():
            if len(result):
                total = local[part]
                add([total if r == self.rank else chunk.slots[r][part] for r in range(self.size)], total)
                result.copy_(total, non_blocking=True)
            chunk.mark = copy_stream.mark()

    def _read_parts(self, copy_stream: CopyStream, local: torch.Tensor, chunk: _Chunk) -> None:
        with copy_stream.coming():
            for rank in range(self.size):
                part = self._part(len(local), rank)
                if rank != self.rank and part.stop > part.start:
                    local[part].copy_(chunk.slots[rank][part], non_blocking=True)
            chunk.mark = copy_stream.mark()
        self._leave_unread(copy_stream, chunk)

    def _part(self, length: int, rank: int) -> slice:
        """Return the part of a chunk that a rank adds up."""
        return slice(rank * length // self.size, (rank + 1) * length // self.size)

    def _done(self, copy_stream: CopyStream, chunk: _Chunk, what: int) -> None:
        """Wait for a chunk's own work, publish it, and wait until the other ranks have done theirs."""
        copy_stream.wait(chunk.mark)
        chunk.channel.publish(what, chunk.number)
        chunk.channel.wait(what, chunk.number)

    def _leave_unread(self, copy_stream: CopyStream, chunk: _Chunk) -> None:
        self.publish_read()
        self._unread = (copy_stream, chunk)

    def publish_read(self) -> None:
        """Publish that the last chunk was read, after its copies are done.

        The others only wait for that some chunks later, so it may be published with the next chunk.
        """
        if self._unread is not None:
            copy_stream, chunk = self._unread
            copy_stream.wait(chunk.mark)
            chunk.channel.publish(READ, chunk.number)
            self._unread = None

    def forget(self) -> None:
        """Drop all references to the segment's memory."""
        self._unread = None
        for channel in self._channels:
            channel.forget()


def add(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of one-dimensional tensors, added in their order, into `out`, which may be one of them.

    Half precision is added up in float32. Parts on the host are copied to the device of `out`.
    """
    parts = [part if part.device == out.device else part.to(out.device, non_blocking=True) for part in parts]
    if out.element_size() < 4:
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        out.copy_(total)
    elif len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
    else:
        total = torch.add(parts[0], parts[1])
        for part in parts[2:]:
            total += part
        out.copy_(total)
