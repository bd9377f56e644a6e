"""Case 27: runs share a machine, a process and an environment without meeting each other's ports."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from launched import TINY
from rich.console import Console
from support import Run, Train

from hetexp.app import conf_dir, register_resolvers, run
from hetexp.core.errors import ConfigError
from hetexp.plan.run_spec import Request

SHORT = (*TINY, "trainer.max_steps=3")


@pytest.fixture
def occupied() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def port(finished: Run) -> int:
    """Return the port of a finished run's store, which must be closed by now."""
    plan = json.loads((finished.folder / "plan.json").read_text())
    with socket.socket() as client:
        assert client.connect_ex((plan["store_host"], plan["store_port"])) != 0
    number: int = plan["store_port"]
    return number


def test_two_runs_side_by_side_in_one_process(tmp_path: Path) -> None:
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        options = [*SHORT, "launch.start_method=forkserver", "trainer.log_every=1"]
        configs = [compose("config", [*options, f"trainer.seed={seed}"]) for seed in range(2)]
    both_begin = threading.Barrier(2)

    def start(seed: int) -> Run:
        folder, screen = tmp_path / str(seed), io.StringIO()
        both_begin.wait(timeout=60)
        summary = run(configs[seed], Request(folder, Path.cwd()), Console(file=screen))
        return Run(folder, summary, screen.getvalue())

    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(start, range(2)))
    assert [one.summary["status"] for one in runs] == ["completed"] * 2
    assert [one.summary["seed"] for one in runs] == [0, 1]
    assert [len(one.losses) for one in runs] == [3, 3]
    assert runs[0].losses != runs[1].losses
    assert port(runs[0]) != port(runs[1])


@pytest.mark.parametrize("method", ["forkserver", "subprocess"])
def test_a_foreign_job_in_the_environment(
    train: Train, monkeypatch: pytest.MonkeyPatch, occupied: int, method: str
) -> None:
    foreign = {
        "MASTER_ADDR": "192.0.2.1",  # nobody's (RFC 5737)
        "MASTER_PORT": str(occupied),
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "8",
    }
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    runs = [train(*SHORT, f"launch.start_method={method}") for _ in range(3 if method == "forkserver" else 1)]
    assert dict(os.environ) == before
    for one in runs:
        assert one.summary["status"] == "completed"
        assert one.summary["world_size"] == 2
        assert port(one) != occupied
        assert one.losses == runs[0].losses


def test_a_chosen_port(train: Train) -> None:
    """A fixed port serves one run after another."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        chosen = listener.getsockname()[1]
    for _ in range(2):
        assert port(train(*SHORT, f"launch.port={chosen}")) == chosen


def test_a_chosen_port_that_is_taken(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, occupied: int
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("hetexp.launch.processes.members.start_rank", never)
    with pytest.raises(ConfigError) as caught:
        train(*SHORT, f"launch.port={occupied}", folder=tmp_path / "run")
    (problem,) = caught.value.problems
    assert problem.startswith("`launch.port` must be ")
    assert f"but is {occupied} instead. Address already in use." in problem
    assert "\n" not in problem
    assert not (tmp_path / "run" / "plan.json").exists()
