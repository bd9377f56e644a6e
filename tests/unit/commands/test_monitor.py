"""`hetexp monitor` and `hetexp top` as commands: what they print, and what they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `monitor` is not installed")

from hetexp.cli import main
from hetexp.monitor import follow
from hetexp.monitor.store import Store

COMMAND = "import sys; from hetexp.cli import main; sys.exit(main())"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'monitor.sqlite'}"


def test_one_moment_is_printed_and_not_kept(
    capsys: pytest.CaptureFixture[str], url: str, tmp_path: Path
) -> None:
    words = [f"monitor.url={url}", "monitor.interval_seconds=0.1"]
    assert main(["monitor", "--once", "--json", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    processor = told["devices"][-1]
    assert processor["device"] == "cpu"
    assert 0 <= processor["utilisation"] <= 1
    assert processor["temperature_celsius"] is None  # what is not known is null
    assert main(["monitor", "--once", *words]) == 0
    screen = capsys.readouterr().out
    assert " cpu " in screen
    assert "n/a" in screen
    store = Store(url)
    assert store.latest() == []
    store.close()


def test_it_samples_until_it_is_told_to_end(url: str) -> None:
    words = ["monitor", "--json", f"monitor.url={url}", "monitor.interval_seconds=0.1"]
    started = subprocess.Popen([sys.executable, "-c", COMMAND, *words], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    moments = [json.loads(started.stdout.readline())["time"] for _ in range(3)]
    os.kill(started.pid, signal.SIGTERM)
    started.stdout.read()
    assert started.wait(20) == 0
    started.stdout.close()
    store = Store(url)
    (series,) = store.history(moments[0], moments[-1] + 0.05, "per_gpu", max_points=1000)
    store.close()
    assert {round(moment, 1) for moment in moments} <= {round(moment, 1) for moment in series.times}


def test_top_without_a_terminal_is_printed_once(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["top", f"monitor.url={url}", "monitor.view=per_gpu", "monitor.interval_seconds=0.1"]) == 0
    screen = capsys.readouterr().out
    assert "each device" in screen
    assert " cpu " in screen


@pytest.mark.parametrize("command", ["monitor", "top"])
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("trainer.max_steps=1", "`OVERRIDE` must be monitor.key=value, but is 'trainer.max_steps=1'"),
        ("monitor.view=both", "`monitor.view` must be 'aggregated' or 'per_gpu', but is 'both' instead."),
        ("monitor.veiw=per_gpu", "`monitor.veiw`"),
    ],
)
def test_what_is_wrong_is_named(
    capsys: pytest.CaptureFixture[str], command: str, word: str, told: str
) -> None:
    assert main([command, word]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "url", "extra"),
    [
        ("sqlalchemy", None, "hetexp[monitor]"),
        ("sqlalchemy", "postgresql://me@host/db", "hetexp[monitor]"),
        ("psycopg", "postgresql://me@host/db", "hetexp[postgres]"),
    ],
)
def test_what_is_not_installed_is_named_with_the_fix(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    url: str | None,
    extra: str,
) -> None:
    monkeypatch.setattr(follow, "find_spec", lambda name: None if name == package else util.find_spec(name))
    assert main(["top", *([f"monitor.url={url}"] if url else [])]) == 2
    assert f"pip install '{extra}'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["top"], ["dashboard", "--port=0"]])
def test_a_database_that_cannot_be_reached_is_told(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if command[0] == "dashboard":
        pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")
    (tmp_path / "monitor.sqlite").mkdir()
    assert main([*command, f"monitor.url=sqlite:///{tmp_path / 'monitor.sqlite'}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("The monitor's database cannot be reached: ") and "monitor.url=" in told
