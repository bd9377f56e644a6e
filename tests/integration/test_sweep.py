"""Cases 24, 25, 27 and 29 for a sweep: awkward values, one failing run, and what is left is run again."""

from __future__ import annotations

import json
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
from launched import TINY, Launched, wait_for

TESTS = Path(__file__).parent.parent
NOTES = ("a=b, c", "2026-01-31", [1, "x"])
"""Values with `=` and a comma, a date, a list."""
OPTIONS = (
    *(option for option in TINY if not option.startswith(("data", "model"))),
    "model=mlp",
    "model.hidden_sizes=[4]",
    "data=custom",
    "data._target_=mended.Mended",
    "+data.broken='today=broken.txt'",
    "trainer.max_steps=1",
    "trainer.seed=5",
    "launch.start_method=forkserver",
    "+hydra.callbacks.watch._target_=mended.Watch",
)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def statuses(sweep: Path) -> list[tuple[str, str]]:
    """Return folder and status of every row, in the order of the file."""
    rows = [json.loads(line) for line in (sweep / "sweep.jsonl").read_text().splitlines()]
    return [(row["folder"], row["status"]) for row in rows]


def nobody_answers(folder: Path) -> bool:
    plan = read(folder / "plan.json")
    with socket.socket() as client:
        return client.connect_ex((plan["store_host"], plan["store_port"])) != 0


@pytest.mark.timeout(300)
def test_three_runs_whose_second_fails_and_is_run_again(tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    environment = {"PYTHONPATH": str(TESTS), "MASTER_PORT": str(taken.getsockname()[1])}
    (tmp_path / "mine").mkdir()
    broken = tmp_path / "mine" / "today=broken.txt"
    broken.write_text("2026-01-31")
    started: list[Launched] = []

    def start(name: str, *overrides: str) -> Launched:
        folder = tmp_path / name
        started.append(Launched(folder, *overrides, environment=environment, run_dir=folder / "outputs"))
        return started[-1]

    try:
        sweeping = "+data.note='a=b, c',2026-01-31,[1,x]"
        first = start("mine", "-m", *OPTIONS, sweeping)
        missing = start(
            "missing", "-m", *OPTIONS, "+data.note='???'", "trainer.log_every=1,2", "sweep.name=a/b"
        )
        assert missing.wait() in (1, 2), missing.screen
        assert first.wait() == 1, first.screen
        (sweep,) = first.run_dir.glob("sweeps/*/*")
        _first_start(sweep, first.screen)
        _missing_values(missing)

        broken.unlink()
        (command,) = re.findall(r"^  (python .*)$", first.screen, re.MULTILINE)
        again = start("mine", *shlex.split(command)[2:])
        assert again.wait() == 0, again.screen
        _second_start(sweep, again.screen)
        assert list(first.run_dir.glob("sweeps/*/*")) == [sweep]
        wait_for(lambda: not any(one.processes() for one in started), "the end of all processes", 20)
    finally:
        taken.close()
        for one in started:
            one.kill()


def _first_start(sweep: Path, screen: str) -> None:
    assert statuses(sweep) == [("0", "completed"), ("1", "failed"), ("2", "completed")]
    folders = sorted(path for path in sweep.iterdir() if path.is_dir())
    assert [folder.name for folder in folders] == ["0", "1", "2"]
    assert sorted(sweep.rglob(".hydra")) == [folder / ".hydra" for folder in folders]
    assert not [path for path in sweep.rglob("*") if "=" in path.name]
    for folder, note in zip(folders, NOTES, strict=True):
        plan = read(folder / "plan.json")
        assert plan["config"]["data"]["note"] == note
        assert plan["config"]["data"]["broken"] == "today=broken.txt"
        assert "sweep" not in plan["config"]
        assert sorted(log.name for log in (folder / "logs").glob("*.log")) == ["rank_0.log", "rank_1.log"]
        assert read(folder / "changed.json") == []
        assert nobody_answers(folder)
    assert len({read(folder / "plan.json")["run_id"] for folder in folders}) == 3
    error = (sweep / "1" / "error.txt").read_text()
    assert re.search(r"RuntimeError: this sample is broken \(mended\.py, line \d+\)\.\n$", error)
    assert not (sweep / "0" / "error.txt").exists()
    assert re.search(r"│ 1 +│ \+data.note=2026-01-31 +│ failed ", screen)
    assert re.search(r"│ 2 +│ \+data.note=\[1,x\] +│ completed +│ +[\d,]+ │", screen)
    assert str(sweep / "1" / "error.txt") in screen


def _second_start(sweep: Path, screen: str) -> None:
    assert "Run 0 (+data.note='a=b, c') completed before: skipped." in screen
    assert "Run 2 (+data.note=[1,x]) completed before: skipped." in screen
    assert statuses(sweep)[3:] == [("1-2", "completed")]
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1", "1-2", "2"]
    assert read(sweep / "1" / "summary.json")["status"] == "failed"  # the attempt stays
    again, before = read(sweep / "1-2" / "plan.json"), read(sweep / "1" / "plan.json")
    assert again["run_id"] != before["run_id"]
    assert (again["config"], again["group"], again["name"]) == (
        before["config"],
        before["group"],
        before["name"],
    )
    assert len(read(sweep / "sweep.json")["continued"]) == 1
    assert "did not complete" not in screen


def _missing_values(run: Launched) -> None:
    """`???` is told by its key, and no process is started for it."""
    assert "`data.note` must be given, but is ??? (missing)." in run.screen
    assert not list(run.run_dir.rglob("plan.json"))
    assert not list(run.run_dir.rglob("logs"))
