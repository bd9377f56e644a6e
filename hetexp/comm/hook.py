"""DDP's exchange of gradients through an `Exchange`, beside backward.

DDP hands over a bucket as soon as backward has filled it. A thread of this hook's own, with a stream of its
own on the device, sums the buckets in the order in which they come while backward goes on.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hetexp.comm.compression import Compressor, compressor_of
from hetexp.comm.exchange import Exchange
from hetexp.core.cost.step import Wire


@dataclass
class _Bucket:
    tensor: torch.Tensor
    parameters: list[torch.Tensor]
    future: torch.futures.Future[torch.Tensor]
    ready: Any
    """On a device with streams, the event of the bucket's being filled."""


class Feedback:
    """What a wire has lost of each parameter's gradient so far.

    DDP rebuilds its buckets after the first step, in another order: what was lost is a parameter's,
    whatever bucket that is in.
    """

    def __init__(self) -> None:
        self.lost: dict[torch.Tensor, torch.Tensor] = {}
        """By parameter, flat; parts of the buckets' tensors."""
        self._buckets: dict[tuple[int, ...], torch.Tensor] = {}

    def of(self, parameters: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return what was lost of a bucket's parameters, in their order, as one tensor to be written to."""
        key = tuple(map(id, parameters))
        if key in self._buckets:
            return self._buckets[key]
        found = torch.zeros_like(like)
        start = 0
        for parameter in parameters:
            part = found[start : start + parameter.numel()]
            if parameter in self.lost:
                part.copy_(self.lost[parameter])
            self.lost[parameter] = part
            start += parameter.numel()
        gone = [old for old in self._buckets if set(old) & set(key)]
        for old in gone:
            del self._buckets[old]
        self._buckets[key] = found
        return found


class Averaging:
    """Averages buckets over all ranks, in the form in which they travel.

    Args:
        exchange: used by one thread alone while gradients are exchanged.
        wire: how gradients travel; codes with error feedback.
        world_size: what the sums are divided by.
    """

    def __init__(self, exchange: Exchange, wire: Wire, world_size: int) -> None:
        self._sums, self._world_size = exchange, world_size
        self._codec: Compressor | None = compressor_of(wire)
        self.forget()

    def forget(self) -> None:
        """Start over: nothing was sent, and nothing lost."""
        self.feedback = Feedback()
        self.sent_bytes = 0
        """That this rank has handed over, coded as it travels."""

    def average_(self, tensor: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        """Replace a bucket by its mean over all ranks.

        Args:
            parameters: of whose gradients the bucket is made, in its order.
        """
        tensor.div_(self._world_size)
        if self._codec is None:
            self._sums.sum_(tensor)
            self.sent_bytes += tensor.numel() * tensor.element_size()
        else:
            self._sums.sum_coded_(tensor, self._codec, self.feedback.of(parameters, tensor))
            self.sent_bytes += self._codec.sent_bytes(len(tensor))


class GradientHook(Averaging):
    """A communication hook for DDP that averages over all ranks, by a thread of its own."""

    def __init__(self, exchange: Exchange, wire: Wire, world_size: int) -> None:
        super().__init__(exchange, wire, world_size)
        self.exchange_seconds = 0.0
        """In which the thread exchanged so far, waits for other ranks included."""
        self._buckets: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._run, name="gradients", daemon=True)
        self._thread.start()

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket that is filled; the future holds its mean over all ranks."""
        tensor, ready = bucket.buffer(), None
        on_device = tensor.device.type == "cuda"
        if on_device:
            # The thread sleeps until the bucket is filled: the exchange looks for its copies without rest.
            ready = torch.cuda.Event(blocking=True)
            ready.record(torch.cuda.current_stream(tensor.device))
        devices: list[int | str | torch.device] = [tensor.device] if on_device else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._buckets.put(_Bucket(tensor, list(bucket.parameters()), future, ready))
        return future

    def close(self, seconds: float | None = None) -> bool:
        """End the thread; buckets that are under way are exchanged first, or fail.

        Args:
            seconds: longest wait for that.

        Returns:
            Whether it has ended.
        """
        self._buckets.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (bucket := self._buckets.get()) is not None:
            try:
                with self._beside(bucket):
                    began = time.perf_counter()
                    self.average_(bucket.tensor, bucket.parameters)
                    self.exchange_seconds += time.perf_counter() - began
                    bucket.future.set_result(bucket.tensor)
            except BaseException as error:  # whatever it is, backward must not wait for ever
                bucket.future.set_exception(error)  # type: ignore[arg-type]

    def _beside(self, bucket: _Bucket) -> Any:
        """Return the context in which a bucket is exchanged: after it is filled, beside what else runs."""
        if bucket.ready is None:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(bucket.tensor.device)
        bucket.ready.synchronize()
        return torch.cuda.stream(self._stream)
