"""The checks of `hetexp doctor`: each fills a section, independently of the others."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import hetexp
from hetexp.commands.support.interpreters import OWN, Interpreter, interpreters, repair_command
from hetexp.commands.support.section import Section
from hetexp.commands.sync import offline_runs
from hetexp.core.device import GIB
from hetexp.core.files import folder_problem
from hetexp.hardware.backend import ACCELERATORS, VISIBILITY
from hetexp.hardware.backends.cpu import cpu_count
from hetexp.hardware.detection.builds import HOME_VARIABLE, home
from hetexp.hardware.detection.busy import who_is_busy
from hetexp.hardware.detection.inventory import Inventory, detect
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.probe import probe_problem
from hetexp.launch.preflight import OPEN_FILES, SHARED_MEMORY, SHARED_MEMORY_A_WORKER
from hetexp.launch.processes.members import package_root
from hetexp.launch.processes.process import rank_environment

EXCHANGE_SECONDS = 60.0
"""Longest time in which two processes import torch and sum a tensor."""

_RANGES = {"hydra-core": ((1, 3, 8), (1, 4)), "omegaconf": ((2, 3), (2, 4))}
"""Packages whose other versions read a command line differently: oldest, and first too new version."""
_VERSIONS = (
    "hydra-core",
    "omegaconf",
    "pydantic",
    "numpy",
    "rich",
    "safetensors",
    "nvidia-ml-py",
    "amdsmi",
    "pyzes",
)
_SHOWN = (
    *VISIBILITY,
    "CUDA_DEVICE_ORDER",
    "HSA_OVERRIDE_GFX_VERSION",
    "ZE_FLAT_DEVICE_HIERARCHY",
    "ZES_ENABLE_SYSMAN",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WANDB_MODE",
)
"""Variables whose values may be shown; no other value is printed."""
_NODES = ("dev/kfd", "dev/dri/renderD*", "dev/dxg")
_SECRETS = ("WANDB_API_KEY", "HF_TOKEN")
"""Secret variables: the report says only whether they are set."""

_EXCHANGE = """
import datetime, json, os, pathlib, sys, time
answer = os.dup(1)
os.dup2(2, 1)  # prints of a library must not get into the answer
sys.path = [path for path in sys.path if path]
rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
import torch, torch.distributed as dist
limit = datetime.timedelta(seconds=30)
port = folder / "port"
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=limit, wait_for_workers=False)
    (folder / "new").write_text(str(store.port))
    (folder / "new").rename(port)
else:
    while not port.exists():
        time.sleep(0.01)
    store = dist.TCPStore("127.0.0.1", int(port.read_text()), 2, timeout=limit, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
value = torch.full((1000,), float(rank + 1))
dist.all_reduce(value)
right = bool((value == 3).all())
dist.barrier()
dist.destroy_process_group()
names = [name for name in ("nccl", "xccl", "ucc", "mpi") if getattr(dist, f"is_{name}_available", bool)()]
os.write(answer, json.dumps([right, names]).encode())
"""


@dataclass
class Context:
    """The machine and the folder that the checks look at; each fact is read once."""

    machine: Machine = field(default_factory=Machine)
    folder: Path = field(default_factory=Path.cwd)

    @cached_property
    def inventory(self) -> Inventory:
        """The cards, with who uses them."""
        return detect(self.machine, busy=who_is_busy(self.machine))

    @cached_property
    def interpreters(self) -> list[Interpreter]:
        """This process's own interpreter and the recorded ones."""
        return interpreters(self.inventory)

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables of this process."""
        return self.machine.environ


def _hetexp(context: Context, section: Section) -> None:
    root = package_root()
    place = f"clone {root}" if root is not None else str(Path(hetexp.__file__).parent)
    section.row("hetexp", f"{hetexp.__version__} ({place})")
    section.row("Python", f"{platform.python_version()} ({sys.executable})")
    for name in _VERSIONS:
        section.row(name, _installed(name) or "not installed")
    for name, (oldest, too_new) in _RANGES.items():
        version_here = _installed(name)
        if version_here is not None and not oldest <= _numbers(version_here) < too_new:
            versions = f">={_dotted(oldest)},<{_dotted(too_new)}"
            section.problem(
                f"{name} must be {versions}, but is {version_here} instead",
                f"{sys.executable} -m pip install '{name}{versions}'",
                blocks=True,
            )
    if _installed("pynvml") is not None:
        section.row("pynvml", f"{_installed('pynvml')} (the wrong package)")
        section.problem(
            "The package pynvml is installed, which warns at each import of torch and hides nvidia-ml-py",
            f"{sys.executable} -m pip uninstall -y pynvml nvidia-ml-py && "
            f"{sys.executable} -m pip install nvidia-ml-py",
        )


def _system(context: Context, section: Section) -> None:
    machine = context.machine
    release = machine.text("/etc/os-release") or ""
    pretty = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
    section.row("system", f"{pretty[1] if pretty else platform.platform()}, {platform.machine()}")
    section.row("kernel", f"{platform.system()} {platform.release()}")
    section.row("cores", f"{cpu_count()} usable of {os.cpu_count()}")
    memory = dict(re.findall(r"^(\w+): +(\d+) kB", machine.text("/proc/meminfo") or "", re.MULTILINE))
    if "MemTotal" in memory:
        free = _gib(int(memory["MemAvailable"]) * 1024) if "MemAvailable" in memory else "n/a"
        section.row("memory", f"{_gib(int(memory['MemTotal']) * 1024)}, {free} available")


def _cards(context: Context, section: Section) -> None:
    inventory = context.inventory
    if not inventory.cards:
        section.row("cards", "none: training runs on the CPU, or emulates cards")
    for card in inventory.cards:
        spec = card.spec
        memory = _gib(spec.memory_bytes) if spec.memory_bytes is not None else "memory not known"
        words = [spec.name, memory, *(["integrated"] if spec.integrated else [])]
        words += [f"driver {spec.driver}"] if spec.driver is not None else []
        why = card.why_not or ""
        state = why if why.startswith(card.state) else f"{card.state}: {why}" if why else card.state
        section.row(f"{spec.number} {spec.id}", f"{', '.join(words)}; {state}")
        # A processor's own GPU is not chosen by default, so an unusable one is no problem.
        if card.state in ("lost", "unusable") and not spec.integrated:
            text, _, fix = str(card.why_not).partition("; run: ")
            section.problem(f"{spec.id} ({spec.name}) cannot be used: {text}", fix or None)
    for backend, problems in inventory.mask_problems.items():
        for problem in problems:
            section.problem(f"The variables that hide {backend} cards are wrong: {problem}")


def _drivers(context: Context, section: Section) -> None:
    machine = context.machine
    nvidia = re.search(r"Module\b.*?\s(\d{3}[\d.]*)\s", machine.text("/proc/driver/nvidia/version") or "")
    section.row("nvidia", nvidia[1] if nvidia else "not loaded")
    for name in ("amdgpu", "i915", "xe"):
        loaded = machine.path(f"/sys/module/{name}").is_dir()
        driver = machine.text(f"/sys/module/{name}/version") or f"of kernel {platform.release()}"
        section.row(name, driver if loaded else "not loaded")
    needed = any(card.spec.vendor in ("amd", "intel") for card in context.inventory.cards)
    nodes = [node for pattern in _NODES for node in sorted(machine.root.glob(pattern))]
    shut = [f"/{node.relative_to(machine.root)}" for node in nodes if not machine.may_open(node)]
    for node in nodes:
        name = f"/{node.relative_to(machine.root)}"
        section.row(name, "may not be opened by this user" if name in shut else "may be opened")
    if shut and needed:
        section.problem(
            f"This user may not open {', '.join(shut)}, through which programs reach AMD's and Intel's cards",
            "sudo usermod -aG render,video $USER   # then log in again",
        )


def _interpreters(context: Context, section: Section) -> None:
    for interpreter in context.interpreters:
        name, build = interpreter.name, interpreter.build
        if build.problem is None:
            drives = ", ".join(interpreter.devices) or "no card of this machine"
            state = f"torch {build.version} for {interpreter.built_for}, drives {drives}"
        else:
            state = f"cannot be used: {build.problem}"
            text = f"The interpreter '{name}' {state}"
            section.problem(text, repair_command(interpreter), blocks=name == OWN)
        section.row(name, f"{state} ({interpreter.python})")
    for kind in ACCELERATORS:
        problem = probe_problem(kind, builds=[interpreter.build for interpreter in context.interpreters])
        if problem is not None:
            section.row(kind, f"torch showed no device when it was last asked: {problem}")


def _collectives(context: Context, section: Section) -> None:
    with tempfile.TemporaryDirectory(prefix="hetexp-doctor-") as folder:
        environment = rank_environment(context.environ, {"CUDA_VISIBLE_DEVICES": ""}, 1, None)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _EXCHANGE, str(rank), folder],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]
        answers, problem = _answers(ranks)
    interface = environment.get("GLOO_SOCKET_IFNAME")
    if problem is None and not all(right for right, _ in answers):
        problem = "the sum that they exchanged is wrong"
    if problem is not None:
        section.row("gloo", f"failed between two processes on '{interface}': {problem}")
        section.problem(
            f"Two processes of this machine cannot exchange a number by gloo on '{interface}': {problem}",
            "unset GLOO_SOCKET_IFNAME"
            if "GLOO_SOCKET_IFNAME" in context.environ
            else "sudo ip link set lo up",
            blocks=True,
        )
        return
    section.row("gloo", f"works between two processes on '{interface}'")
    section.row("torch has", ", ".join(["gloo", *answers[0][1]]))


def _answers(ranks: list[subprocess.Popen[str]]) -> tuple[list[tuple[bool, list[str]]], str | None]:
    """Return the processes' answers, and the reason if one is missing; end all processes."""
    answers, problems = [], []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=EXCHANGE_SECONDS)
            lines = [line.strip() for line in err.splitlines() if line.strip()]
            try:
                answers.append(tuple(json.loads(out)))
            except ValueError:
                problems.append(lines[-1] if lines else f"exit code {rank.returncode}")
    except subprocess.TimeoutExpired:
        problems.append(f"no answer within {EXCHANGE_SECONDS:g} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return answers, problems[0] if problems else None


def _disk(context: Context, section: Section) -> None:
    outputs = context.folder / "outputs"
    existing = next(folder for folder in (outputs, *outputs.parents) if folder.exists())
    section.row("run folders", outputs)
    section.row("free there", _gib(shutil.disk_usage(existing).free))
    if problem := folder_problem(outputs):
        section.problem(f"Runs cannot be written: {problem}", "cd SOMEWHERE_ELSE", blocks=True)
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        section.row(str(SHARED_MEMORY), f"{_gib(free)} free")
        if free < 8 * SHARED_MEMORY_A_WORKER:
            section.problem(
                f"{SHARED_MEMORY} has room for {free // SHARED_MEMORY_A_WORKER} data loader processes; keep "
                "trainer.num_workers below that, or start the container with --shm-size=1g"
            )
    with suppress(ImportError):  # not on Windows
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        unlimited = limit == resource.RLIM_INFINITY
        section.row("open files", "no limit" if unlimited else f"{limit} a process")
        if not unlimited and limit < OPEN_FILES:
            text = f"A process must be allowed at least {OPEN_FILES} open files, but the limit is {limit}"
            section.problem(text, f"ulimit -n {4 * OPEN_FILES}", blocks=True)


def _wandb(context: Context, section: Section) -> None:
    installed = _installed("wandb")
    section.row("wandb", installed or "not installed (metrics.jsonl has all metrics, logger=none)")
    if installed is None:
        return
    section.row(
        "mode",
        context.environ.get("WANDB_MODE") or "offline, since neither WANDB_MODE nor logger.mode is set",
    )
    folders = [folder for name in ("outputs", "multirun") if (folder := context.folder / name).is_dir()]
    runs = offline_runs(folders)
    waiting = [run for run in runs if not run.synced]
    section.row("offline runs", f"{len(waiting)} of {len(runs)} below {context.folder} not uploaded")
    if waiting:
        names = [folder.name for folder in folders if any(folder in run.file.parents for run in waiting)]
        section.row("to upload them", f"hetexp sync {' '.join(names)}")


def _variables(context: Context, section: Section) -> None:
    named = HOME_VARIABLE if HOME_VARIABLE in context.environ else f"the default; {HOME_VARIABLE} is not set"
    section.row("hetexp's files", f"{home()} ({named})")
    if problem := folder_problem(home()):
        section.problem(f"hetexp's own files cannot be written: {problem}", f"export {HOME_VARIABLE}=FOLDER")
    for name in _SHOWN:
        if name in context.environ:
            section.row(name, context.environ[name] or "(empty)")
    for name in _SECRETS:
        if name in context.environ:
            section.row(name, "set")
    if not any(name in context.environ for name in VISIBILITY):
        section.row("cards hidden by", "no variable")


CHECKS: dict[str, Callable[[Context, Section], None]] = {
    "hetexp": _hetexp,
    "machine": _system,
    "cards": _cards,
    "drivers": _drivers,
    "interpreters": _interpreters,
    "exchange": _collectives,
    "room": _disk,
    "W&B": _wandb,
    "variables": _variables,
}
"""Title → check, in the order of the output."""


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"
