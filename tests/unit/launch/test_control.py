"""Orders: files of limited size and of one's own, each answered once, and no run that is not there."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from stranger import NOBODY

from hetexp.commands.control import main_add, main_control
from hetexp.core.errors import SetupError, UsageError
from hetexp.launch.control import LARGEST_BYTES, Answer, Command, ControlServer, ask, find_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs" / "2026-01-31" / "12-00-00-0a1b2c"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    return folder


class Taker(threading.Thread):
    """Answers each order with its own words, as a launcher does in its loop."""

    def __init__(self, server: ControlServer, answers: dict[str, Answer]) -> None:
        super().__init__()
        self.server, self.answers, self.over = server, answers, threading.Event()
        self.seen: list[Command] = []

    def run(self) -> None:
        while not self.over.wait(0.005):
            for command in self.server.commands():
                self.seen.append(command)
                self.server.answer(command, self.answers[command.name])


def test_an_order_and_its_answer(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parents[2])
    with ControlServer(run) as server:
        assert run.joinpath("control").stat().st_mode & 0o777 == 0o700
        taker = Taker(server, {"tell": Answer(True, "said"), "add": Answer(False, "`DEVICE` must be …")})
        taker.start()
        assert ask(run, "tell", "me") == Answer(True, "said")
        assert main_control([run.name, "tell", "me"]) == 0
        assert main_add([str(run), "cuda:7"]) == 1
        taker.over.set()
        taker.join()
        assert [(command.name, command.argument) for command in taker.seen] == [
            ("tell", "me"),
            ("tell", "me"),
            ("add", "cuda:7"),
        ]
    assert not (run / "control").exists()
    told = capsys.readouterr()
    assert told.out == "said\n"
    assert told.err == "`DEVICE` must be …\n"
    assert main_control([str(run), "add"]) == 2


def test_what_is_no_order(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"command": "stop"}')
    with ControlServer(run) as server:
        folder = run / "control"
        bad = {
            "aaaaaaa1": ("x" * (LARGEST_BYTES + 1), "at most"),
            "aaaaaaa2": ("{", "must be JSON"),
            "aaaaaaa3": ("[" * 10_000, "must be JSON"),
            "aaaaaaa4": ('{"command": "../stop"}', "must have a `command`"),
            "aaaaaaa5": ('{"command": "stop", "argument": {}}', "must have a `command`"),
            "aaaaaaa6": ("[]", "must have a `command`"),
        }
        for name, (text, _) in bad.items():
            (folder / f"{name}.json").write_text(text)
        (folder / "aaaaaaa7.json").symlink_to(secret)
        os.mkfifo(folder / "aaaaaaa8.json")
        (folder / "not an id.json").write_text('{"command": "stop"}')
        assert server.commands() == []
        told = {path.name: json.loads(path.read_text()) for path in folder.glob("*.answer.json")}
        for name, (_, reason) in bad.items():
            assert not told[f"{name}.answer.json"]["done"]
            assert reason in told[f"{name}.answer.json"]["text"]
        assert "cannot be read" in told["aaaaaaa7.answer.json"]["text"]
        assert "plain file" in told["aaaaaaa8.answer.json"]["text"]
        assert len(told) == 8
    assert secret.exists()


def test_the_order_of_another_user_does_not_count(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ControlServer(run) as server:
        folder = run / "control"
        for name in ("aaaaaaa1", "aaaaaaa2"):
            (folder / f"{name}.json").write_text('{"command": "stop"}')
        if os.geteuid() == 0:
            os.chown(folder / "aaaaaaa1.json", NOBODY, NOBODY)
            assert [command.id for command in server.commands()] == ["aaaaaaa2"]
        else:
            monkeypatch.setattr(os, "getuid", lambda: NOBODY)
            assert server.commands() == []
        answer = json.loads((folder / "aaaaaaa1.answer.json").read_text())
        (folder / "aaaaaaa1.answer.json").unlink()
    assert not answer["done"]
    assert "the run's own user" in answer["text"]


def test_orders_that_nobody_takes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SetupError, match=r"is not running: nothing answers there, and it has no summary\."):
        ask(run, "stop")
    (run / "summary.json").write_text("{}")
    assert main_control([str(run), "stop"]) == 2
    assert capsys.readouterr().err == f"The run {run} is over.\n"
    with pytest.raises(SetupError, match=r"`RUN` must be the folder of a run \(it has a plan\.json\)"):
        ask(run.parent, "stop")
    with pytest.raises(UsageError, match="`NAME` must be of small letters"):
        ask(run, "Stop it")


def test_an_order_at_the_end_of_a_run(run: Path) -> None:
    answers = []
    with ControlServer(run) as server:
        asking = threading.Thread(target=lambda: answers.append(ask(run, "checkpoint")))
        asking.start()
        while not [*(run / "control").glob("*.json")]:
            threading.Event().wait(0.001)
        assert server is not None
    asking.join()
    assert answers == [Answer(False, "The run has ended.")]


def test_a_run_by_its_name(run: Path) -> None:
    here = run.parents[2]
    assert find_run(run.name, here) == run
    assert find_run(str(run), here) == run
    assert find_run("outputs/2026-01-31/12-00-00-0a1b2c", here) == run
    with pytest.raises(SetupError, match="`RUN` must be the folder of a run, or its name below outputs, but"):
        find_run("12-00-00", here)
    other = here / "outputs" / "2026-02-01" / run.name
    other.mkdir(parents=True)
    (other / "plan.json").write_text("{}")
    with pytest.raises(SetupError, match="It is the name of 2 runs: name its path"):
        find_run(run.name, here)
