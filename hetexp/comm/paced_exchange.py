"""DDP's exchange of gradients at the pace of emulated links.

The bytes really travel through the run's exchange, and the cost model decides when a bucket is ready. Each
rank sends the moment at which its bucket would have reached the host, and all compute the same moment at
which the exchange would have ended. Moments are those of the machine's monotonic clock, which its processes
share.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.
import queue
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetexp.comm.communicator import peer_lost
from hetexp.comm.connections.sockets import remembered
from hetexp.comm.exchange import Exchange
from hetexp.comm.hook import Averaging, Result
from hetexp.core.cost.step import Links, Wire
from hetexp.hardware.emulation.pacing import GRAIN_SECONDS
from hetexp.torch_private import sparse_parts


@dataclass
class _Bucket:
    tensor: torch.Tensor
    parameters: list[torch.Tensor]
    ready: float
    future: torch.futures.Future[torch.Tensor]
    due: float = 0.0


class PacedExchange(Averaging):
    """A communication hook for DDP that averages over all ranks, with the overlap of the emulated links.

    Compression is assumed to run on the device; it has error feedback.

    Args:
        exchange: of all ranks; a thread of this object sums buckets through it.
        links: channels of all ranks.
        rank: this rank.
        settle: waits until the device has computed a bucket.
        done: returns the fraction of backward done, to record when each bucket left.
        timeout_seconds: longest wait for the other ranks.
        wire: type of the gradients on the way.
    """

    def __init__(
        self,
        exchange: Exchange,
        links: Links,
        rank: int,
        settle: Callable[[], None],
        done: Callable[[], float],
        timeout_seconds: float,
        wire: Wire = "float32",
    ) -> None:
        super().__init__(exchange, wire, links.world_size)
        self.links: Links = links
        self._rank, self._settle, self._done = rank, settle, done
        # A separate group: its collectives come from another thread than those of the training loop.
        with remembered():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self.time_scale = 0.0
        self._ratios: list[float] = []
        self.buckets: list[tuple[float, int]] = []
        self.link_seconds: list[tuple[float, float]] = []
        self.late_seconds = self.modelled_seconds = 0.0
        self._to_host_free = self._exchange_free = self._back_free = 0.0
        self._sending: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        self._returning: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._send, self._give_back)]
        for thread in self._threads:
            thread.start()

    def real_ratio(self) -> float:
        return statistics.median(self._ratios) if self._ratios else 0.0

    def late_share(self) -> float:
        return self.late_seconds / self.modelled_seconds if self.modelled_seconds else 0.0

    def start(self, time_scale: float) -> None:
        self.change_pace(time_scale)
        self.forget()

    def change_pace(self, time_scale: float) -> None:
        self.time_scale = time_scale
        self.late_seconds = self.modelled_seconds = 0.0
        self.link_seconds.clear()

    def close(self, seconds: float | None = None) -> bool:
        self._sending.put(None)
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def begin_step(self) -> None:
        self.buckets = []

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._settle()
        tensor = bucket.buffer()
        self.buckets.append((self._done(), _num_bytes(tensor)))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._sending.put(_Bucket(tensor, bucket.parameters(), time.perf_counter(), future))
        return future

    def travel(self, num_bytes: int, seconds: Callable[[Links], float], send: Callable[[], Result]) -> Result:
        self._settle()
        exchange_seconds = seconds(self.links)
        ready, scale = time.perf_counter(), self.time_scale
        to_host = self.links.to_host_seconds(self._rank, num_bytes)
        moment = torch.tensor([ready + to_host * scale], dtype=torch.float64)
        try:
            dist.all_reduce(moment, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise peer_lost(error) from error
        met = time.perf_counter()
        result = send()
        if scale == 0.0:
            modelled = 2 * to_host + exchange_seconds
            self._ratios.append((time.perf_counter() - met) / modelled if modelled else 0.0)
            return result
        due = float(moment) + (exchange_seconds + to_host) * scale
        self._wait_until(due, ready)
        return result

    def _send(self) -> None:
        failure: Exception | None = None
        while (bucket := self._sending.get()) is not None:
            if failure is None:
                try:
                    self._exchange(bucket)
                except Exception as error:  # of any class: backward must not wait for ever
                    failure = error
            if failure is not None:  # no later bucket waits for a rank that is gone
                bucket.future.set_exception(failure)  # type: ignore[arg-type]
                continue
            self._returning.put(bucket)
        self._returning.put(None)

    def _exchange(self, bucket: _Bucket) -> None:
        num_bytes = _num_bytes(bucket.tensor)
        links, scale = self.links, self.time_scale
        out = links.bucket_out_seconds(self._rank, num_bytes)
        at_host = max(bucket.ready, self._to_host_free) + out * scale
        # Ranks may have different numbers of a sparse gradient's rows; all send as many as the largest has.
        moment = torch.tensor([at_host, num_bytes], dtype=torch.float64)
        dist.all_reduce(moment, op=dist.ReduceOp.MAX, group=self._group)
        met, num_bytes = time.perf_counter(), int(moment[1])
        back = links.bucket_back_seconds(self._rank, num_bytes)
        start = max(float(moment[0]), self._exchange_free)
        exchanged = start + links.bucket_seconds(num_bytes) * scale
        bucket.due = max(exchanged, self._back_free) + back * scale
        self._to_host_free, self._exchange_free, self._back_free = at_host, exchanged, bucket.due
        bucket.tensor = self.average(bucket.tensor, bucket.parameters)
        if scale == 0.0:
            modelled = out + links.bucket_seconds(num_bytes) + back
            self._ratios.append((time.perf_counter() - met) / modelled)

    def _give_back(self) -> None:
        while (bucket := self._returning.get()) is not None:
            self._wait_until(bucket.due, bucket.ready)
            bucket.future.set_result(bucket.tensor)

    def _wait_until(self, due: float, ready: float) -> None:
        """Wait until `due`, when the data that left at `ready` is back."""
        left = due - time.perf_counter()
        if left > 0:
            time.sleep(left)
        if self.time_scale > 0.0:
            now = time.perf_counter()
            self.link_seconds.append((now - ready, due - ready))
            self.modelled_seconds += due - ready
            self.late_seconds += max(0.0, now - due - GRAIN_SECONDS)


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a bucket; of a sparse gradient those of its rows and their indices."""
    if not tensor.is_sparse:
        return tensor.numel() * tensor.element_size()
    return sum(part.nbytes for part in sparse_parts(tensor))
