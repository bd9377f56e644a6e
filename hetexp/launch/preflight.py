"""What a machine must offer before a run may start, checked before anything is started.

`check_machine` is the launcher's part. What only a rank can know, the size of its model, is checked there
by `check_checkpoint_space`, before the first step.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetexp.core.config import Config
from hetexp.core.errors import SetupError
from hetexp.core.files import folder_problem
from hetexp.core.plan import Plan
from hetexp.launch.environments.interpreter import check_interpreter
from hetexp.launch.processes.hosts import is_here

if TYPE_CHECKING:
    import torch
    from torch import nn

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_AN_ITEM = 4 * 2**20
"""Least bytes of shared memory for a microbatch that a data loader process hands over through it."""
SHARED_MEMORY_A_WORKER = 2 * SHARED_MEMORY_AN_ITEM
"""Those of a process, with as many microbatches ahead as by default."""
OPEN_FILES = 256
"""Least open files a process may have: a rank has libraries, sockets and its data loader's pipes."""

_HOW_A_STEP_IS_COMPUTED = {"fused", "foreach", "capturable"}
"""Options of torch's optimizers that need a real device."""

_LOG = logging.getLogger(__name__)


def check_machine(plan: Plan, config: Config, environments: Sequence[Mapping[str, str]]) -> None:
    """Check what no configuration value shows: interpreters, the run folder, shared memory, limits.

    Args:
        environments: of each rank, as it will be started.

    Raises:
        SetupError: names everything that is in the way, at once.
    """
    problems = [
        *_interpreters(plan, environments),
        *_run_folder(Path(plan.run_dir)),
        *_shared_memory(plan.world_size * config.trainer.num_workers, config.trainer.prefetch_factor),
        *_open_files(),
        *_interface(plan, environments),
    ]
    if len(problems) == 1:
        raise SetupError(problems[0])
    if problems:
        lines = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(problems, start=1))
        raise SetupError(f"{len(problems)} things keep this run from starting:\n{lines}")


def check_checkpoint_space(folder: Path, needed: int, count: int) -> None:
    """Check that a checkpoint will fit, before hours of training show that it does not.

    Where one fits but not all of them do, a warning says so.

    Args:
        folder: that checkpoints go to, or will once it is made.
        needed: bytes of a checkpoint (`checkpoint_bytes`).
        count: most checkpoints of the run that there will be at one time.

    Raises:
        SetupError: names the folder, what is free and what is needed.
    """
    if count < 1:
        return
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise SetupError(
            f"{folder} must have room for a checkpoint of this model and its optimizer ({_size(needed)}), "
            f"but only {_size(free)} are free there. Free some space, or choose another disk: hydra.run.dir="
        )
    if free < needed * count:
        _LOG.warning(
            "%s has %s free: room for %d of the %d checkpoints of %s each that there may be at one time. "
            "A larger trainer.checkpoint_every or checkpoint_minutes writes fewer, keep_last keeps fewer.",
            folder,
            _size(free),
            free // needed,
            count,
            _size(needed),
        )


def checkpoint_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the size of a checkpoint's tensors, those included that the optimizer has not made yet."""
    tensors = {id(value): value for value in model.state_dict(keep_vars=True).values()}
    return sum(_nbytes(value) for value in tensors.values()) + _optimizer_bytes(optimizer)


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the size of the state after the first step: of that step's rehearsal, without any memory."""
    import torch

    groups = []
    for group in optimizer.param_groups:
        copies = [torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]
        for copy in copies:
            copy.grad = torch.empty_like(copy)
        plain = dict.fromkeys(_HOW_A_STEP_IS_COMPUTED & group.keys(), False)
        groups.append({**group, **plain, "params": copies})
    try:
        make: Callable[..., torch.optim.Optimizer] = type(optimizer)
        rehearsed = make(groups)
        rehearsed.step()
        state = rehearsed.state
    except Exception:  # a person's own class may do anything; most keep two values a parameter, as Adam does
        return 2 * sum(_nbytes(p) for group in optimizer.param_groups for p in group["params"])
    return sum(_nbytes(value) for values in state.values() for value in values.values())


def _nbytes(value: object) -> int:
    import torch

    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _interpreters(plan: Plan, environments: Sequence[Mapping[str, str]]) -> Iterator[str]:
    checked: set[str | None] = {None}
    for device, environment in zip(plan.devices, environments, strict=True):
        if device.python in checked or not is_here(device):
            continue
        checked.add(device.python)
        try:
            check_interpreter(device, environment, plan.working_dir)
        except SetupError as error:
            yield str(error)


def _run_folder(folder: Path) -> Iterator[str]:
    if problem := folder_problem(folder):
        yield f"The run folder {folder} must be writable, but {problem}"
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield f"The run folder {folder} must be writable, but it is not: {error.strerror or error}."


def _shared_memory(num_workers: int, prefetch_factor: int) -> Iterator[str]:
    if num_workers == 0 or not SHARED_MEMORY.is_dir():
        return
    needed = num_workers * prefetch_factor * SHARED_MEMORY_AN_ITEM
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        yield (
            f"{SHARED_MEMORY} must have {needed / 2**20:.0f} MiB free for {num_workers} data loader "
            f"processes (trainer.num_workers a rank) with {prefetch_factor} microbatches ahead "
            f"(trainer.prefetch_factor), but has {free / 2**20:.0f} MiB. Set trainer.num_workers=0, or "
            "give it more (in a container: --shm-size=1g)."
        )


def _open_files() -> Iterator[str]:
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and limit < OPEN_FILES:
            yield (
                f"A process must be allowed at least {OPEN_FILES} open files, but the limit is {limit}. "
                f"Raise it in this shell: ulimit -n {4 * OPEN_FILES}"
            )


def _interface(plan: Plan, environments: Sequence[Mapping[str, str]]) -> Iterator[str]:
    wanted = environments[0].get("GLOO_SOCKET_IFNAME", "")
    if plan.world_size == 1 or plan.collective_backend != "gloo" or not wanted:
        return
    there = [name for _, name in socket.if_nameindex()]
    unknown = [name for name in wanted.split(",") if name not in there]
    if unknown:
        yield (
            f"The variable GLOO_SOCKET_IFNAME must name network interfaces of this machine "
            f"({', '.join(there)}), but is '{wanted}'. Unset it: ranks of one machine meet on the loopback."
        )


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
