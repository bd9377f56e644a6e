"""F6: what a machine lacks is told before any process starts; a disk that fills up ends a run well."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pkgutil
import resource
import shutil
import socket
import subprocess
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hurt import fill
from refusal import Refusals
from rich.console import Console
from support import Train, checked, start_run
from torch import nn

from hetexp.checkpoint.folder import find_checkpoint
from hetexp.checkpoint.manifest import write_folder
from hetexp.core.errors import CheckpointError, ConfigError, RunFailedError, SetupError
from hetexp.core.files import folder_problem
from hetexp.core.plan import Plan
from hetexp.launch import preflight
from hetexp.launch.environments.interpreter import check_own_interpreter
from hetexp.launch.launcher import _Run, launch
from hetexp.launch.preflight import check_checkpoint_space, check_machine, checkpoint_bytes
from hetexp.launch.processes.failure import NO_ROOM, RankFailure, log_path, read_failure
from hetexp.launch.processes.members import Member
from hetexp.launch.processes.process import Start, SubprocessRank
from hetexp.launch.processes.store import bind
from hetexp.plan.planner import make_plan
from hetexp.plan.run_spec import RunSpec

TWO = "hardware.devices=[cpu,cpu]"
MIB = 2**20
Usage = namedtuple("Usage", "total used free")
Mount = Callable[..., Path]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Refusals:
    return Refusals(monkeypatch, capfd, tmp_path / "run")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount a small file system in memory, where the tests may."""
    mounted: list[Path] = []

    def make(*options: str) -> Path:
        folder = tmp_path / f"mounted_{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("only root may mount a file system")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def planned(run_dir: Path, *overrides: str) -> tuple[Plan, RunSpec]:
    """Return what the launcher would be given."""
    spec = checked(TWO, *overrides, run_dir=run_dir).accepted()
    return make_plan(spec), spec


def refusal(plan: Plan, spec: RunSpec, **variables: str) -> str:
    with pytest.raises(SetupError) as caught:
        check_machine(plan, spec.config, [variables] * plan.world_size)
    return str(caught.value)


def interpreter(path: Path, answer: str, mode: int = 0o755) -> str:
    """Make a program that answers as an interpreter would."""
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(mode)
    return str(path)


# ---------------------------------------------------------------- interpreters

INTERPRETERS = {
    "without torch": ("echo '[[3, 11], [\"torch\"]]'", ["lacks torch", "-m pip install hetexp"]),
    "too old": ("echo '[[3, 8], []]'", ["must be Python 3.10 or newer, but is 3.8"]),
    "that fails": ("echo 'no such module: _ctypes' >&2; exit 1", ["is no Python", "no such module: _ctypes"]),
    "that says nothing": ("exit 3", ["is no Python", "exit code 3"]),
}


@pytest.mark.parametrize(("answer", "told"), INTERPRETERS.values(), ids=INTERPRETERS.keys())
def test_interpreter(refused: Refusals, tmp_path: Path, answer: str, told: list[str]) -> None:
    path = interpreter(tmp_path / "python", answer)
    screen = refused([f"hardware.devices=[{{device: cpu, python: {path}}}]"])
    for part in ("The interpreter of cpu:0 (", path, *told):
        assert part in screen, screen


def test_interpreter_that_is_no_program(refused: Refusals, tmp_path: Path) -> None:
    path = interpreter(tmp_path / "python", "true", mode=0o644)
    screen = refused([f"hardware.devices=[{{device: cpu, python: {path}}}]"])
    assert f"{path}, cannot be started: Permission denied." in screen


def test_own_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    check_own_interpreter()
    monkeypatch.setattr(
        "hetexp.launch.environments.interpreter.find_spec", lambda name: None if name == "torch" else name
    )
    with pytest.raises(SetupError, match=r"This interpreter, .*python.*, lacks torch\. Install hetexp"):
        check_own_interpreter()


def test_everything_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = interpreter(tmp_path / "old", "echo '[[3, 8], []]'")
    empty = interpreter(tmp_path / "empty", "echo '[[3, 11], [\"torch\"]]'")
    monkeypatch.setattr(preflight, "OPEN_FILES", 10**9)
    plan, spec = planned(tmp_path / "run", "trainer.num_workers=1")
    devices = tuple(replace(d, python=p) for d, p in zip(plan.devices, (old, empty), strict=True))
    told = refusal(replace(plan, devices=devices), spec, GLOO_SOCKET_IFNAME="^lo")
    assert told.startswith("4 things keep this run from starting:\n  1. The interpreter of cpu:0 (")
    for part in ("  2. The interpreter of cpu:1 (", "3.8", "lacks torch", "open files", "^lo"):
        assert part in told


def test_a_machine_that_is_ready(tmp_path: Path) -> None:
    plan, spec = planned(tmp_path / "run", "trainer.num_workers=1")
    check_machine(plan, spec.config, [{}, {}])
    assert list((tmp_path / "run").iterdir()) == []


# ---------------------------------------------------------------- folders and space


def test_run_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = refusal(*planned(tmp_path / "file" / "run"))
    assert told == f"The run folder {tmp_path}/file/run must be writable, but {tmp_path}/file is a file."


def test_run_folder_on_a_read_only_disk(refused: Refusals, mount: Mount) -> None:
    folder = mount("ro")
    screen = refused([f"hydra.run.dir={folder}/run"])
    assert f"`hydra.run.dir` must be a folder that can be written, but is '{folder}/run' instead." in screen
    assert f"{folder} cannot be written by this user." in screen


def test_run_folder_that_another_user_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"{tmp_path} cannot be written by this user." in refusal(*planned(tmp_path / "run"))


def test_run_folder_that_refuses_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a quota does, which no permission shows."""

    def no_file(dir: Path) -> Any:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    plan, spec = planned(tmp_path / "run")
    monkeypatch.setattr("hetexp.launch.preflight.tempfile.TemporaryFile", no_file)
    assert refusal(plan, spec) == (
        f"The run folder {tmp_path}/run must be writable, but it is not: Disk quota exceeded."
    )


def test_no_space_for_logs(refused: Refusals, mount: Mount) -> None:
    folder = mount("size=1m")
    screen = refused([f"hydra.run.dir={folder}/run"])
    assert f"only 1.0 MiB are free in {folder}" in screen


def test_folder_that_is_fine(tmp_path: Path) -> None:
    assert folder_problem(tmp_path / "a" / "b") == ""
    assert not (tmp_path / "a").exists()


def test_folder_that_holds_a_run(refused: Refusals, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").touch()
    screen = refused([])
    assert f"`hydra.run.dir` must be a new folder, but {tmp_path}/run holds a run already" in screen


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 * MIB, 36 * MIB, 28 * MIB))
    plan, spec = planned(tmp_path / "run", "trainer.num_workers=2")
    told = refusal(plan, spec)
    assert told.startswith("/dev/shm must have 32 MiB free for 4 data loader processes")
    assert "with 2 microbatches ahead" in told
    assert "but has 28 MiB. Set trainer.num_workers=0, or" in told
    plan, spec = planned(tmp_path / "run", "trainer.num_workers=1")
    check_machine(plan, spec.config, [{}, {}])
    more = planned(tmp_path / "run", "trainer.num_workers=1", "trainer.prefetch_factor=4")
    assert refusal(*more).startswith("/dev/shm must have 32 MiB free for 2 data loader processes")


def built(optimizer: Callable[..., Any], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with a tied weight, and its optimizer."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    model[1].weight = model[0].weight
    return model, optimizer(model.parameters(), **options)


class Unusual(torch.optim.SGD):
    """Cannot be rehearsed: its constructor is its own."""

    def __init__(self, params: Any, wanted: int) -> None:
        super().__init__(params, lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    ],
)
def test_size_of_a_checkpoint(
    tmp_path: Path, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    from hetexp.checkpoint.folder import TrainingState, save_checkpoint

    model, made = built(optimizer, **options)
    before, draw = checkpoint_bytes(model, made), torch.get_rng_state()
    assert not made.state
    model(torch.ones(2, 256)).sum().backward()
    made.step()
    assert before == checkpoint_bytes(model, made)
    assert torch.equal(torch.get_rng_state(), draw)
    folder = save_checkpoint(tmp_path, model, made, TrainingState(1, {}, {}, {}))
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert before <= written < before + 4096  # what is more is the tensors' names


def test_size_of_an_unusual_optimizer() -> None:
    model, made = built(Unusual, wanted=1)
    assert checkpoint_bytes(model, made) == 3 * sum(4 * p.numel() for p in model.parameters())


def test_space_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = built(torch.optim.Adam)
    needed = checkpoint_bytes(model, made)
    folder = tmp_path / "run" / "checkpoints"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed - 1))
    with pytest.raises(SetupError) as caught:
        check_checkpoint_space(folder, needed, 1)
    told = str(caught.value)
    assert told.startswith(f"{folder} must have room for a checkpoint of this model and its optimizer (")
    assert "(0.8 MiB), but only 0.8 MiB are free there" in told
    assert "choose another disk: hydra.run.dir=" in told
    check_checkpoint_space(folder, needed, 0)  # a run that writes none
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 3 * needed))
    warnings: list[str] = []
    monkeypatch.setattr(preflight._LOG, "warning", lambda text, *values: warnings.append(text % values))
    check_checkpoint_space(folder, needed, 3)
    assert not warnings
    check_checkpoint_space(folder, needed, 4)
    assert "room for 3 of the 4 checkpoints" in warnings[0]


RUN = (
    TWO,
    "model=mlp",
    "data=synthetic",
    "data.num_samples=64",
    "trainer.global_batch_size=16",
    "trainer.max_epochs=null",
)


def test_no_space_for_the_first_checkpoint(train: Train, mount: Mount) -> None:
    folder = mount("size=6m")
    with pytest.raises(RunFailedError, match="must have room for a checkpoint") as caught:
        train(*RUN, "model.hidden_sizes=[1000,1000]", "trainer.max_steps=3", folder=folder / "run")
    assert "SetupError" not in str(caught.value)
    assert not (folder / "run" / "metrics.jsonl").exists()


def test_disk_that_fills_up(train: Train, mount: Mount) -> None:
    """The checkpoints before stay whole, and the reason is told although little can be written."""
    folder = mount("size=12m")
    options = ("model.hidden_sizes=[500,500]", "trainer.checkpoint_every=1", "trainer.max_steps=20")
    with pytest.raises(RunFailedError) as caught:
        train(*RUN, *options, "trainer.on_save_error=stop", folder=folder / "run")
    checkpoints = folder / "run" / "checkpoints"
    newest = find_checkpoint(folder / "run")
    failed = checkpoints / f"step_{int(newest.name[5:]) + 1:08d}"
    told = str(caught.value)
    assert f"The checkpoint '{failed}' could not be written: " in told
    assert "No space left on device" in told and "The earlier checkpoints are unchanged." in told
    assert not [path for path in checkpoints.iterdir() if path.name.startswith(".")]
    assert "room for " in (folder / "run" / "logs" / "rank_0.log").read_text()
    shutil.rmtree(folder / "run")
    run = train(*RUN, *options, "trainer.keep_last=1", "trainer.keep_best=0", folder=folder / "run")
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000020"]
    assert run.summary["checkpoint"] == str(checkpoints / "step_00000020")
    assert "room for " not in (folder / "run" / "logs" / "rank_0.log").read_text()


@pytest.mark.parametrize(
    ("when", "file"),
    [
        ("hetexp.plan.planner.make_plan", "config.yaml"),
        ("hetexp.launch.launcher.bind", "plan.json"),
        ("hetexp.launch.launcher._Run.accept_commands", "logs"),
    ],
)
def test_disk_that_is_full_before_the_first_step(
    train: Train, mount: Mount, monkeypatch: pytest.MonkeyPatch, when: str, file: str
) -> None:
    """Whatever is written first when there is no room ends the run in one line."""
    folder = mount("size=6m", "nr_inodes=20" if file == "logs" else "nr_inodes=1000")
    before = pkgutil.resolve_name(when)

    def full(*arguments: Any, **options: Any) -> Any:
        found = before(*arguments, **options)
        fill(folder)
        if file == "logs":  # nor for one more name
            with contextlib.suppress(OSError):
                for number in range(20):
                    (folder / str(number)).touch()
        return found

    monkeypatch.setattr(when, full)
    with pytest.raises(RunFailedError) as caught:
        train(*RUN, "trainer.max_steps=3", folder=folder / "run")
    told = str(caught.value)
    assert told.startswith(f"{folder}/run/{file}") and "could not be written: No space left" in told
    assert told.endswith(f"make room, and go on with resume={folder}/run.") and "\n" not in told
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("dies", [False, True])
def test_disk_that_is_full_while_ranks_train(train: Train, mount: Mount, dies: bool) -> None:
    """The metrics have no more room, or the plan of those that a lost rank leaves."""
    folder = mount("size=6m")
    model = ("model=custom", "model._target_=hurt.Filling", f"+model.folder={folder}", f"+model.dies={dies}")
    common = ("data=synthetic", "trainer.global_batch_size=16", "trainer.max_epochs=null", "+model.step=4")
    more = ("trainer.max_steps=2000", "trainer.log_every=1", f"fault.survive={dies}")
    with pytest.raises(RunFailedError) as caught:
        train(TWO, *common, *model, *more, folder=folder / "run")
    told = str(caught.value)
    assert "could not be written: No space left on device." in told and "\n" not in told
    assert ("plans" if dies else "rank 0") in told, told
    assert "Traceback" not in caught.value.screen  # type: ignore[attr-defined]
    assert not list(folder.rglob("*.tmp"))


def test_rank_that_cannot_tell_of_a_full_disk(tmp_path: Path) -> None:
    """Its exit code says so."""
    failure = read_failure(log_path(tmp_path, 1), 1, NO_ROOM)
    told = f"{tmp_path} could not be written: No space left on device. The files in {tmp_path} are whole: "
    assert failure.message == f"{told}make room, and go on with resume={tmp_path}."
    assert not failure.peer_lost


def test_a_checkpoint_that_cannot_be_written_keeps_the_old_one(tmp_path: Path) -> None:
    def save(content: str, error: OSError | None = None) -> None:
        with write_folder(tmp_path, 1) as folder:
            (folder / "part").write_text(content)
            if error is not None:
                raise error

    save("old")
    with pytest.raises(CheckpointError) as caught:
        save("new", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert str(caught.value).startswith(f"The checkpoint '{tmp_path}/step_00000001' could not be written: ")
    assert (find_checkpoint(tmp_path) / "part").read_text() == "old"


def test_summary_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    screen = io.StringIO()
    run = _Run(*planned(tmp_path / "run"), Console(file=screen, width=300), store=None)
    run.failures.append(RankFailure(1, "ValueError", "the reason"))
    monkeypatch.setattr("hetexp.launch.launcher.write_json", full)
    assert "the reason" in run.conclude([])["error"]
    assert f"{tmp_path}/run/summary.json could not be written: No space left on device." in screen.getvalue()


def test_temporary_files_of_an_ended_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan, spec = planned(tmp_path / "run")
    start = Start(tmp_path / "plan", 0, "/bin/true", dict(os.environ), str(tmp_path), tmp_path / "log")
    run = _Run(plan, spec, Console(file=io.StringIO()), store=None)
    process = SubprocessRank(start)
    run.started.append(Member(0, plan.devices[0], process, start.log_path))
    for pid in (process.pid, os.getpid()):
        (tmp_path / f"hetexp-{pid}-abc").mkdir()
    process.wait(10)
    run.end()
    assert [path.name for path in tmp_path.glob("hetexp-[0-9]*")] == [f"hetexp-{os.getpid()}-abc"]


# ---------------------------------------------------------------- limits, ports, network


def test_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, spec = planned(tmp_path / "run")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 4096))
    told = refusal(plan, spec)
    assert told.startswith("A process must be allowed at least 256 open files, but the limit is 64.")
    assert "ulimit -n 1024" in told


@pytest.mark.parametrize("name", ["^lo", "eth99", "lo,eth99"])
def test_network_interface(tmp_path: Path, name: str) -> None:
    plan, spec = planned(tmp_path / "run")
    told = refusal(plan, spec, GLOO_SOCKET_IFNAME=name)
    assert "GLOO_SOCKET_IFNAME must name network interfaces of this machine (lo" in told
    assert f"but is '{name}'. Unset it" in told
    check_machine(replace(plan, devices=plan.devices[:1]), spec.config, [{"GLOO_SOCKET_IFNAME": name}])


def test_busy_port(refused: Refusals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        screen = refused([TWO, f"launch.port={port}"])
    assert "`launch.port` must be a port that this process may open on 127.0.0.1, or 0 for a free" in screen
    assert f"but is {port} instead. Address already in use." in screen


def test_no_loopback() -> None:
    with pytest.raises(SetupError, match=r"must be able to listen on 192\.0\.2\.1, .*\(ip link set lo up\)"):
        bind("192.0.2.1", 0)


def test_process_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("hetexp.launch.processes.members.start_rank", no_process)
    with pytest.raises(SetupError, match=r"Rank 0 on cpu:0 \(.*\) cannot be started: .*temporarily unavail"):
        launch(*planned(tmp_path / "run"), Console(file=io.StringIO()))


# ---------------------------------------------------------------- what only a rank can find


def test_model_that_does_not_fit_the_data(train: Train) -> None:
    with pytest.raises(RunFailedError) as caught:
        train(TWO, "model=gpt", "data=digits", "trainer.max_steps=1")
    for key in ("vocab_size", "sequence_length"):
        sentence = f"`model.{key}` must be given if the data does not give it, but is null instead."
        assert sentence in caught.value.screen  # type: ignore[attr-defined]


def test_checkpoints_that_cannot_be_resumed(train: Train, tmp_path: Path) -> None:
    done = train(*RUN, "trainer.max_steps=1", "model.hidden_sizes=[8]", folder=tmp_path / "first")
    (checkpoint,) = (done.folder / "checkpoints").iterdir()
    with pytest.raises(RunFailedError) as caught:
        train(*RUN, "trainer.max_steps=2", "model.hidden_sizes=[9]", f"resume={done.folder}")
    assert "`resume` must name a checkpoint with tensors of the model's shapes" in str(caught.value)
    assert "(8, 16) for (9, 16)" in str(caught.value)
    (checkpoint / "manifest.json").unlink()
    for path in (done.folder, checkpoint):
        with pytest.raises(ConfigError) as refused:
            start_run(tmp_path / "third", (*RUN, f"resume={path}"))
        assert f"'{path}' instead." in str(refused.value)
        assert "has no manifest.json: its save did not end" in str(refused.value)
