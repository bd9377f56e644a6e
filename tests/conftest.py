"""Every test leaves the machine as it found it: processes, environment, shared memory, folder."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings
from support import Run, Train, start_run
from xdist.scheduler import LoadFileScheduling

from hetexp.launch.processes import process as ranks

# torch's compiler would start processes of its own, which outlive the test; it reads the variable once.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Ranks of the tests of adapters would each import it for seconds; the server goes without what is missing. It
# imports bitsandbytes, which opens the card: no process that is forked afterwards could use it.
if importlib.util.find_spec("bitsandbytes") is None:
    ranks.PRELOADED = (*ranks.PRELOADED, "peft")
# For whatever test starts the session's server first: all ranks are forked from one that has imported torch.
multiprocessing.set_forkserver_preload(list(ranks.PRELOADED))
# A busy machine is slow: no time is a condition.
settings.register_profile("hetexp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hetexp")
SHARED_MEMORY = Path("/dev/shm")
SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Processes of Python's own that serve the whole test session and end with it."""
SET_BY_IMPORTS = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",  # torch's compiler
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn
    "KMP_INIT_AT_FORK",
}
"""Variables that other libraries set when they are first imported."""
GPU = "tests/gpu/"
NO_CARDS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ONEAPI_DEVICE_SELECTOR": "opencl:cpu"}
"""Variables that hide all cards, of this process and of all that a test starts."""
_AS_STARTED = {name: os.environ.get(name) for name in NO_CARDS}
_TORCH_SEES = (torch.cuda.is_available, torch.cuda.device_count)
LONG = (
    "integration/test_environments.py",
    "integration/test_launchers.py",
    "integration/test_lora.py",
    "integration/test_tutorial.py",
    "integration/test_signals.py",
    "integration/test_out_of_memory.py",
    "integration/test_exact.py",
    "integration/test_failures.py",
    "integration/test_multirun.py",
    "integration/test_package.py",
    "integration/test_schedules.py",
    "integration/test_staged.py",
    "integration/test_wandb.py",
    "integration/test_examples.py",
    "integration/test_compile.py",
    "integration/test_ports.py",
    "unit/commands/test_plan.py",
    "unit/balancing/test_fit.py",
    "unit/balancing/test_scheduler.py",
)
"""Files that take longest, the longest first; emulated devices are tested where other tests are short."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: at the end the other workers would wait for them.

    Tests that need a card come first, since one worker runs them all. Files that are not long follow by their
    number of tests, which is xdist's own order.
    """
    files = Counter(item.path for item in items)
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    places |= {item.path: -1 for item in items if item.nodeid.startswith(GPU)}
    items.sort(key=lambda item: (places.get(item.path, len(LONG)), -files[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Hide the machine's cards from every test outside `tests/gpu`, before any fixture is made.

    Once a test of a card has opened CUDA in this process, the variables come too late for torch.
    """
    for_cards = item.nodeid.startswith(GPU)
    for name, value in (_AS_STARTED if for_cards else NO_CARDS).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    seen = for_cards or not torch.cuda.is_initialized()
    torch.cuda.is_available, torch.cuda.device_count = _TORCH_SEES if seen else (lambda: False, lambda: 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Give all files of `tests/gpu` to one worker: side by side they would find their card busy."""
    return CardsTakeTurns(config, log) if config.getoption("dist") == "loadfile" else None


class CardsTakeTurns(LoadFileScheduling):  # type: ignore[misc] # xdist has no types
    """Hands out tests by file, and all tests that need a card as one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return GPU if file.startswith(GPU) else file


def _enable_loggers() -> None:
    """Undo what Hydra does for a job that is run in this process: it switches all known loggers off."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("hetexp") and isinstance(logger, logging.Logger):
            logger.disabled = False


@pytest.fixture(scope="session", autouse=True)
def hetexp_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep hetexp's own files out of the person's home; runs that tests start as commands inherit it."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEXP_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def nothing_measured_yet(hetexp_home: Path) -> None:
    """Let no test get the calibrations of another one."""
    shutil.rmtree(hetexp_home / "calibrations", ignore_errors=True)


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    environment = dict(os.environ)
    level = logging.root.level
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    folder, files = Path.cwd(), set(Path.cwd().iterdir())
    shared = _shared_memory()
    processes = _children()
    yield
    _enable_loggers()
    logging.root.setLevel(level)  # Hydra's, too
    left = _children() - processes
    _, alive = psutil.wait_procs(left, timeout=10)  # ended children are reaped, slow ones get their chance
    for process in alive:
        process.kill()
    assert not alive, f"processes left behind: {alive}"
    assert Path.cwd() == folder
    assert set(folder.iterdir()) - files <= {folder / "outputs"}, "files left in the working folder"
    left = {name for name in _shared_memory() - shared if not _of_another_process(name)}
    assert not left, f"shared memory left behind: {left}"
    changed = {k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)}
    changed -= SET_BY_IMPORTS
    assert not changed, f"environment changed: {changed}"
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def _children() -> set[psutil.Process]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            command, database = " ".join(process.cmdline()), process.name() == "postgres"
            ended = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if database:  # the session's own server, which starts a process a connection (`postgres.server`)
            continue
        # A fork of the server has the server's own command line, and the server as its parent.
        if any(server in command for server in SERVERS) and process.ppid() == os.getpid():
            continue
        if not ended:
            found.add(process)
    return found


def _of_another_process(name: str) -> bool:
    """Whether a segment carries the id of a process that lives and is none of ours."""
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    ours = {os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))}
    return any(number not in ours and psutil.pid_exists(number) for number in numbers if 1 < number < 2**31)


def _shared_memory() -> set[str]:
    if not SHARED_MEMORY.is_dir():
        return set()
    # The database of the tests of the monitor belongs to their session, and maybe to one beside this one.
    # The C library gives a semaphore a random name for the moment in which any process makes it.
    names = {entry.name for entry in SHARED_MEMORY.iterdir() if not entry.name.startswith("PostgreSQL.")}
    return {name for name in names if not re.fullmatch(r"sem\.[A-Za-z0-9]{6}", name)}


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Run `train.py` with the given overrides, in a new folder each time (or in `folder`)."""
    number = 0

    def start(*overrides: str, folder: Path | None = None) -> Run:
        nonlocal number
        number += 1
        return start_run(folder or tmp_path / f"run_{number}", overrides)

    return start
