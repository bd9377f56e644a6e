"""Devices whose library behaves as NCCL does when a rank is lost, on the CPU.

A collective of such a group does not fail: it waits until its group is aborted. Then it ends without an error
and leaves wrong numbers. A rank that still waits gets wrong numbers as soon as any other one has aborted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from hetexp.core.device import DeviceSpec
from hetexp.hardware.backend import Backend
from hetexp.hardware.detection.detected import DetectedCard, Reading

NAME = "hanging"
COUNT = 4
GARBAGE = 1e30


class HangingBackend(Backend):
    """Cards of an imaginary maker; the CPU does their work."""

    name = NAME
    vendor = "acme"
    native_collective = NAME
    native_aborts = True

    @classmethod
    def cards(cls, machine: Any, on_bus: Any) -> list[DetectedCard]:
        return [
            DetectedCard(
                DeviceSpec(
                    id=f"{NAME}:{index}",
                    backend="hanging.HangingBackend",
                    index=index,
                    name="Acme Hanging",
                    vendor=cls.vendor,
                    memory_bytes=2**30,
                    uuid=f"ACME-{index}",
                    precisions=("float64", "float32"),
                ),
                Reading(memory_free_bytes=2**30),
            )
            for index in range(COUNT)
        ]

    @classmethod
    def environment(cls, spec: DeviceSpec) -> dict[str, str]:
        return {"ACME_VISIBLE_CARDS": str(spec.index)}

    def torch_device(self) -> torch.device:
        if not hasattr(dist.Backend, NAME.upper()):
            dist.Backend.register_backend(NAME, HangingGroup, devices=["cpu"])
        return torch.device("cpu")

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        return None

    def peak_memory_bytes(self) -> int:
        return 1


class _Work(_distributed_c10d.Work):
    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._done = threading.Event()
        self._outputs = outputs
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def finish(self) -> None:
        self._done.set()
        self._future.set_result(self._outputs)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._done.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


_Base: Any = dist.ProcessGroup
"""torch's stubs lack the signatures that Python's groups use."""


class HangingGroup(_Base):  # type: ignore[misc]
    """gloo underneath; its thread stands for the device's stream."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timeout)
        self._aborted = threading.Event()
        self._queue: queue.SimpleQueue[tuple[_Work, Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return NAME

    def abort(self) -> None:
        with suppress(Exception):  # the store's waits end with the membership
            self._store.set("aborted", "")
        self._aborted.set()

    def shutdown(self) -> None:
        return None

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> _Work:
        return self._queued(tensors, lambda: self._gloo.allreduce(tensors, options))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        return self._queued(tensors, lambda: self._gloo.broadcast(tensors, options))

    def allgather(self, outputs: Any, inputs: list[torch.Tensor], options: Any = None) -> _Work:
        start = lambda: self._gloo.allgather(outputs, inputs, _distributed_c10d.AllgatherOptions())  # noqa: E731
        return self._queued(outputs[0], start)

    def _queued(self, outputs: list[torch.Tensor], start: Callable[[], Any]) -> _Work:
        if self._aborted.is_set():
            raise RuntimeError("this communicator was aborted, so that a process would crash here")
        work = _Work(outputs)
        self._queue.put((work, start))
        return work

    def _run(self) -> None:
        while True:
            work, start = self._queue.get()
            try:
                if self._aborted.is_set():
                    raise RuntimeError("aborted")
                start().wait()
            except RuntimeError:
                while not self._aborted.wait(0.005) and not self._poisoned():
                    pass
                for output in work._outputs:
                    output.fill_(GARBAGE if output.is_floating_point() else 77)
            work.finish()

    def _poisoned(self) -> bool:
        with suppress(Exception):
            return bool(self._store.check(["aborted"]))
        return False
