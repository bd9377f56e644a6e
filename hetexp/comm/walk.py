"""The walk of a tensor through shared memory, chunk by chunk: one channel of `hetexp.comm.shared_memory`.

Each rank has `DEPTH` slots of a chunk. It writes its chunks into them one after another, and may write into
a slot again once the others have read it: counters of what a rank has written, summed and read are all that
ranks tell each other. While one chunk is summed, the next leaves the device and the one before comes back.

`shared_sum.c` takes the same walk for tensors on the host, with the same counters and slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetexp.comm.segment import Segment, Waiter

DEPTH = 6
"""Slots of each rank. With fewer than 4 the ranks would wait for each other in a circle."""
WRITTEN, SUMMED, READ = range(3)


class Lane(Protocol):
    """How tensors of one kind of device get into the segment and out of it."""

    def leaving(self) -> AbstractContextManager[Any]:
        """Return the context for copies into the segment."""
        ...

    def coming(self) -> AbstractContextManager[Any]:
        """Return the context for copies out of it, and for sums."""
        ...

    def mark(self) -> Any:
        """Return what `wait` takes, for everything that was issued in the present context so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Return when that is done."""
        ...

    def begin(self, several: bool) -> None:
        """Start with a tensor that the current stream has ready; several chunks may be under way at once."""
        ...

    def end(self) -> None:
        """Let the current stream have the result."""
        ...


class HostLane:
    """Tensors on the CPU: whatever is issued is done."""

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


class CudaLane:
    """Tensors of a CUDA or ROCm device, whose runtime has page-locked the segment.

    The copies out and in run on streams of their own: a card has an engine for each direction.
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


class Walk:
    """One channel, and how far this rank has come in it; every rank takes the same walk."""

    def __init__(self, segment: Segment, waiter: Waiter, place: Place) -> None:
        self._segment, self._waiter, self._place = segment, waiter, place
        self.rank, self.size = segment.rank, segment.size
        data = segment.data
        self._slots = [[data[place.slot(rank, i)] for i in range(DEPTH)] for rank in range(self.size)]
        self.chunks = 0
        """That have begun so far: the number of the next one."""
        self._unread: tuple[Lane, Any, int] | None = None
        """The last chunk that was read: its lane, the mark of its end, and the counter to publish then."""

    def sum_alone(self, lane: Lane, flat: torch.Tensor, chunk: int) -> None:
        """Let every rank read all ranks' chunks and add them up for itself.

        Args:
            chunk: numbers of one.
        """

        def read(bounds: slice, slots: Sequence[torch.Tensor]) -> None:
            own = flat[bounds]
            add([own if r == self.rank else slots[r] for r in range(self.size)], own)

        self._each(lane, flat, chunk, read)

    def gather(self, lane: Lane, everyone: Sequence[torch.Tensor], chunk: int) -> None:
        """Copy the others' tensors into `everyone`, where this rank's own one is already."""

        def read(bounds: slice, slots: Sequence[torch.Tensor]) -> None:
            for rank, tensor in enumerate(everyone):
                if rank != self.rank:
                    tensor[bounds].copy_(slots[rank], non_blocking=True)

        self._each(lane, everyone[self.rank], chunk, read)

    def _each(
        self,
        lane: Lane,
        flat: torch.Tensor,
        chunk: int,
        read: Callable[[slice, Sequence[torch.Tensor]], None],
    ) -> None:
        """Hand each chunk to all ranks, and call `read` with its bounds and all ranks' slots."""
        pieces = list(_bounds(len(flat), chunk))
        self.publish_read()
        lane.begin(len(pieces) > 1)
        left: Any = None
        for step in range(len(pieces) + 1):
            written = left
            if step < len(pieces):
                left = self._write(lane, flat, pieces[step], self.chunks + step, in_parts=False)
            if step == 0:
                continue
            number, bounds = self.chunks + step - 1, pieces[step - 1]
            self._tell(lane, WRITTEN, written, number)
            self._wait(WRITTEN, number)
            with lane.coming():
                read(bounds, self._views(number, flat.dtype, bounds))
                mark = lane.mark()
            self._leave_unread(lane, mark, number)
        self.chunks += len(pieces)
        lane.end()

    def sum_in_parts(self, lane: Lane, flat: torch.Tensor, chunk: int) -> None:
        """Let every rank add up its part of each chunk, and read the other parts from those that did."""
        pieces = list(_bounds(len(flat), chunk))
        self.publish_read()
        lane.begin(len(pieces) > 1)
        written: dict[int, Any] = {}
        summed: dict[int, Any] = {}
        for step in range(len(pieces) + 2):
            if step < len(pieces):
                number = self.chunks + step
                written[number] = self._write(lane, flat, pieces[step], number, in_parts=True)
            if 1 <= step <= len(pieces):
                number = self.chunks + step - 1
                self._tell(lane, WRITTEN, written.pop(number), number)
                self._wait(WRITTEN, number)
                summed[number] = self._sum_part(lane, flat, pieces[step - 1], number)
            if step >= 2:
                number = self.chunks + step - 2
                self._tell(lane, SUMMED, summed.pop(number), number)
                self._wait(SUMMED, number)
                self._read_parts(lane, flat, pieces[step - 2], number)
        self.chunks += len(pieces)
        lane.end()

    def _write(self, lane: Lane, flat: torch.Tensor, bounds: slice, number: int, in_parts: bool) -> Any:
        """Copy a chunk into this rank's slot, all of it or what other ranks add up."""
        self._wait(READ, number - DEPTH)
        own, slot = flat[bounds], self._views(number, flat.dtype, bounds)[self.rank]
        with lane.leaving():
            if in_parts:
                part = self._part(len(own), self.rank)
                for there in (slice(0, part.start), slice(part.stop, len(own))):
                    if there.stop > there.start:
                        slot[there].copy_(own[there], non_blocking=True)
            else:
                slot.copy_(own, non_blocking=True)
            return lane.mark()

    def _sum_part(self, lane: Lane, flat: torch.Tensor, bounds: slice, number: int) -> Any:
        slots, chunk = self._views(number, flat.dtype, bounds), flat[bounds]
        part = self._part(len(chunk), self.rank)
        own = chunk[part]
        with lane.coming():
            if len(own):
                add([own if r == self.rank else slots[r][part] for r in range(self.size)], own)
                slots[self.rank][part].copy_(own, non_blocking=True)
            return lane.mark()

    def _read_parts(self, lane: Lane, flat: torch.Tensor, bounds: slice, number: int) -> None:
        slots, chunk = self._views(number, flat.dtype, bounds), flat[bounds]
        with lane.coming():
            for rank in range(self.size):
                part = self._part(len(chunk), rank)
                if rank != self.rank and part.stop > part.start:
                    chunk[part].copy_(slots[rank][part], non_blocking=True)
            mark = lane.mark()
        self._leave_unread(lane, mark, number)

    def _part(self, length: int, rank: int) -> slice:
        """Return the part of a chunk that a rank adds up."""
        return slice(rank * length // self.size, (rank + 1) * length // self.size)

    def _views(self, number: int, dtype: torch.dtype, bounds: slice) -> list[torch.Tensor]:
        """Return all ranks' slots of a chunk, as so many numbers of a type."""
        num_bytes = (bounds.stop - bounds.start) * dtype.itemsize
        return [slots[number % DEPTH][:num_bytes].view(dtype) for slots in self._slots]

    def _tell(self, lane: Lane, what: int, mark: Any, number: int) -> None:
        """Tell that this rank has done this with a chunk, once it has."""
        lane.wait(mark)
        self._publish(what, number + 1)

    def _publish(self, what: int, value: int) -> None:
        self._segment.publish(self._place.first_word + what * self.size + self.rank, value)

    def _wait(self, what: int, number: int) -> None:
        """Wait until all other ranks have done this with a chunk; of the first ones nothing is asked."""
        if number < 0:
            return
        for rank in range(self.size):
            if rank != self.rank:
                word = self._place.first_word + what * self.size + rank
                self._waiter.wait(word, (number + 1) & 0xFFFFFFFF, rank)

    def _leave_unread(self, lane: Lane, mark: Any, number: int) -> None:
        self.publish_read()
        self._unread = (lane, mark, number + 1)

    def publish_read(self) -> None:
        """Tell that the last chunk was read, which on a device takes until its copies are done.

        The others ask for that `DEPTH` chunks later, so that it may be told with the next chunk.
        """
        if self._unread is not None:
            lane, mark, value = self._unread
            lane.wait(mark)
            self._publish(READ, value)
            self._unread = None

    def forget(self) -> None:
        """Let go of the segment's memory."""
        self._slots, self._unread = [], None


def add(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Put the sum of one-dimensional tensors into `out`, one of them, adding in their order.

    Half precision is added up in float32. Parts on the host are brought to the device of `out`.
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


def _bounds(length: int, chunk: int) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))
