"""Communication hooks by which DDP exchanges gradients through an `Exchange`, in parallel to backward.

DDP calls the hook with a bucket as soon as backward has filled it. The thread of `GradientHook`, with its own
stream on the device, sums the buckets in that order while backward goes on. On emulated devices
`hetexp.comm.paced_exchange.PacedExchange` takes its place; without any hook, `CommHook` does.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hetexp.comm.compression import Compressor, compressor_of
from hetexp.comm.exchange import Exchange
from hetexp.comm.forms import as_real, sum_sparse
from hetexp.core.cost.step import Links, Wire

Result = TypeVar("Result")


@dataclass
class _Bucket:
    tensor: torch.Tensor
    parameters: list[torch.Tensor]
    future: torch.futures.Future[torch.Tensor]
    ready: Any
    """On a device with streams, the event after which the bucket is filled."""


class Feedback:
    """The error of compressing each parameter's gradient so far.

    DDP rebuilds its buckets after the first step, in another order. So errors are kept by parameter, whatever
    its bucket.
    """

    def __init__(self) -> None:
        self.lost: dict[torch.Tensor, torch.Tensor] = {}
        """Errors by parameter, flat; views of the buckets' tensors."""
        self._buckets: dict[tuple[int, ...], torch.Tensor] = {}

    def of(self, parameters: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return the errors of a bucket's parameters, in their order, as one tensor to update in place."""
        key = tuple(map(id, parameters))
        if key in self._buckets:
            return self._buckets[key]
        feedback = torch.zeros_like(like)
        start = 0
        for parameter in parameters:
            numbers = parameter.numel() * (2 if parameter.is_complex() else 1)
            part = feedback[start : start + numbers]
            if parameter in self.lost:
                part.copy_(self.lost[parameter])
            self.lost[parameter] = part
            start += numbers
        for old in [old for old in self._buckets if set(old) & set(key)]:
            del self._buckets[old]
        self._buckets[key] = feedback
        return feedback


class CommHook:
    """The interface to a rank's hook; the base is that of a rank whose gradients need none.

    It is so for a single rank, and if torch's own exchange serves.
    """

    sent_bytes = 0
    """Bytes that this rank has sent, after compression."""
    exchange_seconds: float | None = None
    """Time of all exchanges so far, with waits for other ranks; `None` if not measured."""
    links: Links | None = None
    """Channels of emulated devices."""
    buckets: Sequence[tuple[float, int]] = ()
    """Of the last step on emulated devices: fraction of backward done when the bucket left, bytes."""
    link_seconds: Sequence[tuple[float, float]] = ()
    """Of each bucket on emulated links from leaving to being back: real time, modelled time × scale."""

    def begin_step(self) -> None:
        """Prepare for the buckets of another step."""

    def travel(self, num_bytes: int, seconds: Callable[[Links], float], send: Callable[[], Result]) -> Result:
        """Run an exchange that is no part of backward, in the time that emulated links would take.

        Every rank calls it, from the thread that trains.

        Args:
            num_bytes: bytes from the device to the host, and back.
            seconds: returns the modelled time between these two.
            send: runs the real exchange.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """
        return send()

    def real_ratio(self) -> float:
        """Return the median of real ÷ modelled time of a bucket before pacing started."""
        return 0.0

    def late_share(self) -> float:
        """Return the seconds past the due moments ÷ modelled seconds, since pacing started."""
        return 0.0

    def start(self, time_scale: float) -> None:
        """Pace every bucket from now on; forget the warm-up."""

    def change_pace(self, time_scale: float) -> None:
        """Pace every bucket in another way from now on, in the midst of a training."""

    def close(self, seconds: float | None = None) -> bool:
        """End the hook's threads; buckets that are under way are exchanged first, or fail.

        Args:
            seconds: longest wait for each of them.

        Returns:
            Whether they have ended.
        """
        return True


class Averaging(CommHook, ABC):
    """Averages buckets over all ranks, compressed if the wire type asks for it.

    Args:
        exchange: used by a single thread while gradients are exchanged.
        wire: type of the gradients on the way; compression has error feedback.
        world_size: number of ranks; gradients are divided by it before they are summed.
    """

    def __init__(self, exchange: Exchange, wire: Wire, world_size: int) -> None:
        self._transport, self._world_size = exchange, world_size
        self._compressor: Compressor | None = compressor_of(wire)
        self.forget()

    def forget(self) -> None:
        """Reset the error feedback and the count of bytes."""
        self.feedback = Feedback()
        self.sent_bytes = 0

    @abstractmethod
    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a filled bucket; the future holds its mean over all ranks."""

    def average(self, tensor: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a bucket's mean over all ranks; a dense bucket is replaced by it.

        A complex bucket travels as its real and imaginary parts. A sparse one is a single gradient, whose
        rows travel as they are, also where others are compressed.

        Args:
            tensor: the bucket, flat unless it is sparse.
            parameters: of the bucket's gradients, in its order.
        """
        if tensor.is_sparse:
            mean, num_bytes = sum_sparse(self._transport, tensor.coalesce() / self._world_size)
            self.sent_bytes += num_bytes
            return mean
        self._average_(as_real(tensor).view(-1), parameters)
        return tensor

    def _average_(self, tensor: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        tensor.div_(self._world_size)  # before the sum: a large gradient must not overflow
        if self._compressor is None:
            self._transport.sum_(tensor)
            self.sent_bytes += tensor.numel() * tensor.element_size()
        else:
            self._transport.sum_coded_(tensor, self._compressor, self.feedback.of(parameters, tensor))
            self.sent_bytes += self._compressor.sent_bytes(len(tensor))


class GradientHook(Averaging):
    """A communication hook for DDP that averages over all ranks in its own thread."""

    def __init__(self, exchange: Exchange, wire: Wire, world_size: int) -> None:
        super().__init__(exchange, wire, world_size)
        self.exchange_seconds: float = 0.0
        self._buckets: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._run, name="gradients", daemon=True)
        self._thread.start()

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        tensor, ready = bucket.buffer(), None
        on_device = tensor.device.type == "cuda"
        if on_device:
            # The thread sleeps until the bucket is filled, since the exchange would poll for its copies.
            ready = torch.cuda.Event(blocking=True)
            ready.record(torch.cuda.current_stream(tensor.device))
        devices: list[int | str | torch.device] = [tensor.device] if on_device else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._buckets.put(_Bucket(tensor, list(bucket.parameters()), future, ready))
        return future

    def close(self, seconds: float | None = None) -> bool:
        self._buckets.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (bucket := self._buckets.get()) is not None:
            try:
                with self._beside(bucket):
                    began = time.perf_counter()
                    mean = self.average(bucket.tensor, bucket.parameters)
                    self.exchange_seconds += time.perf_counter() - began
                    bucket.future.set_result(mean)
            except BaseException as error:  # of any class: backward must not wait for ever
                bucket.future.set_exception(error)  # type: ignore[arg-type]

    def _beside(self, bucket: _Bucket) -> Any:
        """Wait until a bucket is filled, and return the context of its exchange: a separate stream."""
        if bucket.ready is None:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(bucket.tensor.device)
        bucket.ready.synchronize()
        return torch.cuda.stream(self._stream)
