"""`hetexp sync` against a stand-in for the package wandb, which does what the real command was seen to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hetexp.cli import main
from hetexp.commands import sync

STAND_IN = """
import json, os, sys, time
from pathlib import Path
command, *words = sys.argv[1:]
assert command == "sync"
seen = {"words": words, "mode": os.environ.get("WANDB_MODE"), "input": sys.stdin.read()}
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps(seen) + "\\n")
if os.environ.get("KEY") == "none":
    print("Error: No API key configured. Use `wandb login` to log in.")
    sys.exit(1)
for folder in map(Path, [word for word in words if word.startswith("/")]):
    (file,) = folder.glob("*.wandb")
    if "bad" in file.name:
        print(f"wandb: ERROR {file.name}: corrupt record", flush=True)
    elif "crash" in file.name:
        sys.exit("panic: runtime error")
    elif "stuck" in file.name:
        print("wandb: setting up", flush=True)
        time.sleep(600)
    else:
        file.with_name(file.name + ".synced").touch()
"""

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server() -> Iterator[str]:
    """Something that answers, if not as W&B does."""

    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), NotFound) as one:
        Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_port}"
        one.shutdown()


@pytest.fixture
def say(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Say:
    """Return exit code, output and errors of `hetexp sync` in `tmp_path`."""
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sync, "server_address", lambda: server)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["sync", *words])
        screen = capsys.readouterr()
        return code, screen.out, screen.err

    return call


def make(run_dir: Path, name: str = "run", ended: bool = True, synced: bool = False) -> Path:
    """Make what an offline run leaves; return W&B's folder of it."""
    folder = run_dir / "wandb" / f"offline-run-20260131_120000-{name}"
    (folder / "files").mkdir(parents=True)
    (folder / f"run-{name}.wandb").touch()
    (run_dir / "plan.json").touch()
    if ended:
        (run_dir / "summary.json").touch()
    if synced:
        (folder / f"run-{name}.wandb.synced").touch()
    latest = folder.parent / "latest-run"
    latest.symlink_to(folder, target_is_directory=True)
    return folder


def calls(tmp_path: Path) -> list[dict[str, Any]]:
    """Return what wandb was called with, each time, since the last question."""
    path = tmp_path / "seen.json"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    return lines


def test_the_newest_sweep_is_synced_once(say: Say, tmp_path: Path) -> None:
    day = tmp_path / "outputs" / "sweeps" / "2026-01-31"
    make(day / "11-59-59-ffffff" / "0", "older")
    sweep = day / "12-00-00-0a1b2c"
    folders = [make(sweep / str(job), f"job-{job}") for job in range(3)]
    make(sweep / "3", "before", synced=True)
    make(sweep / "4", "still", ended=False)
    code, out, err = say("--dry-run")
    assert code == 0 and not calls(tmp_path)
    assert out.count("would sync") == 3
    code, out, err = say()
    assert (code, err) == (0, "")
    (call,) = calls(tmp_path)
    assert call == {"words": list(map(str, folders)), "mode": None, "input": ""}
    assert "5 offline W&B runs, 1 of them synced before" in out
    assert out.count("synced  ") == 3
    assert f"left for later  {sweep / '4'}" in out
    code, out, err = say()
    assert code == 0 and not calls(tmp_path)
    assert say("--unfinished")[0] == 0
    (call,) = calls(tmp_path)
    assert [Path(word).parents[1].name for word in call["words"]] == ["4"]


@pytest.mark.parametrize(("name", "said"), [("bad", "corrupt record"), ("crash", "panic: runtime error")])
def test_one_that_fails_keeps_none_of_the_others(name: str, said: str, say: Say, tmp_path: Path) -> None:
    for job, one in enumerate(("first", name, "last")):
        make(tmp_path / "runs" / str(job), one)
    code, out, err = say("runs", "runs/0", "--project", "mine", "--entity", "team")
    assert code == 1
    together, *alone = (call["words"] for call in calls(tmp_path))
    assert together[:4] == ["--project", "mine", "--entity", "team"]
    assert len(together) == 7  # each once
    assert [len(words) for words in alone] == [5] * (1 if name == "bad" else 2)
    assert out.count("synced  ") == 2
    assert err.count(said) == 1
    assert err.splitlines()[-2:] == [
        "Not synced (1); hetexp sync tries again:",
        f"  {tmp_path / 'runs' / '1'}",
    ]


def test_one_that_hangs_is_ended(say: Say, tmp_path: Path) -> None:
    for job, name in enumerate(("first", "stuck")):
        make(tmp_path / "runs" / str(job), name)
    code, out, err = say("runs", "--timeout", "2")
    assert code == 1
    assert f"synced  {tmp_path / 'runs' / '0'}" in out
    assert "nothing was sent for 2 s (--timeout)" in err and f"  {tmp_path / 'runs' / '1'}" in err


def test_nobody_logged_in(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in range(3):
        make(tmp_path / "runs" / str(job))
    monkeypatch.setenv("KEY", "none")
    code, _, err = say("runs")
    assert code == 1 and len(calls(tmp_path)) == 1
    assert "run `wandb login`, or set WANDB_API_KEY" in err


def test_no_network(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "runs" / "0")
    monkeypatch.setattr(sync, "server_address", lambda: "http://127.0.0.1:9")
    code, _, err = say("runs")
    assert code == 1
    assert err.startswith("Nothing was synced: W&B's server http://127.0.0.1:9 cannot be reached (")
    assert not calls(tmp_path)


def test_wrong_folders(say: Say, tmp_path: Path) -> None:
    code, _, err = say()
    assert code == 2 and "`FOLDER` must be given if there is no sweep" in err
    code, _, err = say("nowhere")
    assert code == 2 and "`FOLDER` must be a folder with runs, but is 'nowhere' instead." in err
    with pytest.raises(SystemExit):
        say("--timeout", "0")
