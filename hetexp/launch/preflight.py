"""Checks of the machine before a run: interpreters, folders, memory and limits of the system.

The launcher calls `check_machine`. A rank calls `check_checkpoint_space` before the first step, because only
a rank knows the size of its model.
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
from hetexp.core.errors import SetupError, logged
from hetexp.core.files import folder_problem
from hetexp.core.plan import Plan
from hetexp.launch.environments.interpreter import check_interpreter
from hetexp.launch.processes.hosts import is_here

if TYPE_CHECKING:
    import torch
    from torch import nn

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_AN_ITEM = 4 * 2**20
"""Least bytes of shared memory for each microbatch from a data loader process."""
SHARED_MEMORY_A_WORKER = 2 * SHARED_MEMORY_AN_ITEM
"""Least bytes for each data loader process with the default `prefetch_factor`."""
OPEN_FILES = 256
"""Least open files that a process needs for libraries, sockets and its data loader's pipes."""

_DEVICE_ONLY = {"fused", "foreach", "capturable"}
"""Options of torch's optimizers that need a real device."""

_LOG = logging.getLogger(__name__)


def check_machine(plan: Plan, config: Config, environments: Sequence[Mapping[str, str]]) -> None:
    """Check interpreters, the run folder, shared memory and limits, which no configuration shows.

    Args:
        environments: environment variables of each rank.

    Raises:
        SetupError: names all problems at once.
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
    """Check before the training that a checkpoint fits on the disk; warn if not all of them do.

    Args:
        folder: for the checkpoints; it need not exist yet.
        needed: bytes of a checkpoint (`checkpoint_bytes`).
        count: most checkpoints of the run that exist at one time.

    Raises:
        SetupError: names the folder, its free space and the needed one.
    """
    if count < 1:
        return
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
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
    """Return the size of a checkpoint's tensors, including those of the optimizer's first step."""
    tensors = {id(value): value for value in model.state_dict(keep_vars=True).values()}
    return sum(_nbytes(value) for value in tensors.values()) + _optimizer_bytes(optimizer)


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the size of the optimizer's state after its first step, from a trial on the meta device."""
    import torch

    groups = []
    for group in optimizer.param_groups:
        copies = [torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]
        for copy in copies:
            copy.grad = torch.empty_like(copy)
        plain = dict.fromkeys(_DEVICE_ONLY & group.keys(), False)
        groups.append({**group, **plain, "params": copies})
    # A user's own class may do anything; most keep two values per parameter, as Adam does.
    with logged("the optimizer's state is taken for two values a parameter", logging.INFO):
        make: Callable[..., torch.optim.Optimizer] = type(optimizer)
        trial = make(groups)
        trial.step()
        return sum(_nbytes(value) for values in trial.state.values() for value in values.values())
    return 2 * sum(_nbytes(p) for group in optimizer.param_groups for p in group["params"])


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
    named = environments[0].get("GLOO_SOCKET_IFNAME", "")
    if plan.world_size == 1 or plan.collective_backend != "gloo" or not named:
        return
    interfaces = [name for _, name in socket.if_nameindex()]
    if not set(named.split(",")) <= set(interfaces):
        yield (
            f"The variable GLOO_SOCKET_IFNAME must name network interfaces of this machine "
            f"({', '.join(interfaces)}), but is '{named}'. Unset it: ranks of one machine use the loopback."
        )


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
