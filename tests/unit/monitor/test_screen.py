"""What `hetexp top` shows, at 80 columns and 24 lines and at others, and what its keys do."""

from __future__ import annotations

import io
import os
import pty
import signal
import sys
import tty
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("sqlalchemy", reason="the extra `monitor` is not installed")

from hetexp.core.config import MonitorConfig
from hetexp.core.device import GIB
from hetexp.monitor.keys import Keys
from hetexp.monitor.processes import lives, started_at
from hetexp.monitor.sample import Device, Sample, User, as_dict, host_name
from hetexp.monitor.screen import Shown, meter, rendered, short_id, sparkline, table_of
from hetexp.monitor.store import Store
from hetexp.monitor.top import Top

HERE = host_name()
NOW = 1_700_000_040.0


def sample(number: int, **more: Any) -> Sample:
    device = Device(f"{HERE}/{number}", HERE, f"cuda:{number}", number, "NVIDIA H200", "nvidia", "cuda")
    known: dict[str, Any] = {
        "utilisation": 0.5,
        "memory_used_bytes": 60 * GIB,
        "memory_total_bytes": 141 * GIB,
        "temperature_celsius": 61.0,
        "power_watts": 400.0,
        "power_limit_watts": 700.0,
        "clock_mhz": 1980.0,
        "throttled": (),
        "users": (User("outputs-2026-01-31-12-00-00-0a1b2c", number),),
    }
    return Sample(device, **(known | more))


MANY = [
    *(sample(number) for number in range(6)),
    Sample(replace(sample(6).device, name="Intel UHD Graphics 770"), memory_total_bytes=32 * GIB),
    Sample(sample(7).device, "lost", "GPU is lost"),
]


def training(name: str, state: str, **more: Any) -> dict[str, Any]:
    known = dict.fromkeys(("progress", "step", "steps", "samples_per_second", "loss", "error", "pid"))
    row = {"id": f"id-{name}", "name": name, "state": state, "gpu_ids": ["cuda:0"], "host": HERE}
    return {**known, "process_mark": None, **row, **more}


RUNS = [
    training(
        "strategy=ddp,model=gpt,data=text,trainer.max_steps=100000",
        "running",
        progress=0.42,
        step=42_000,
        steps=100_000,
    ),
    training("a", "failed", error="rank 1, cuda:1, failed at step 7: CUDA error"),
    training("b", "completed", progress=1.0, loss=0.01),
]


def shown(**more: Any) -> Shown:
    known: dict[str, Any] = {
        "mode": "aggregated",
        "devices": [as_dict(one) for one in MANY],
        "trainings": RUNS,
        "chosen": "id-a",
    }
    return Shown(HERE, NOW, **(known | more))


def text_of(what: Any, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    console.print(what)
    return console.export_text()


@pytest.mark.parametrize("mode", ["aggregated", "per_gpu"])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (116, 24), (200, 50), (60, 15)])
def test_it_fits_the_terminal(mode: str, width: int, height: int) -> None:
    lines = text_of(rendered(shown(mode=mode), width, height), width).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "hetexp top" in text
    assert "q quit" in text
    assert "running" in text


def test_all_devices_together() -> None:
    text = text_of(rendered(shown(), 80, 24), 80)
    assert "8 devices   1 lost" in text
    assert "50%" in text
    assert "360/846 GiB" in text  # of those that tell
    assert "2400/4,200 W" in text
    assert "61 °C" in text
    assert "cuda:7 is lost: GPU is lost" in text
    assert "rank 1, cuda:1, failed at step 7" in text  # of the chosen run


def test_each_device() -> None:
    text = text_of(rendered(shown(mode="per_gpu"), 80, 24), 80)
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "50%" in lines["cuda:0"]
    assert "60.0/141 G" in lines["cuda:0"]
    assert "61°" in lines["cuda:0"]
    assert "400 W" in lines["cuda:0"]
    assert lines["cuda:6"].count("n/a") == 4  # nothing of it is known, and nothing is 0
    assert " 0%" not in lines["cuda:6"]
    wide = text_of(rendered(shown(mode="per_gpu"), 160, 40), 160)
    assert "0a1b2c #3" in wide
    assert "1980" in wide


def from_right(number: int, age: float, **more: Any) -> dict[str, Any]:
    one = sample(number, **more)
    device = replace(one.device, key=f"right/{number}", host="right", name="NVIDIA T4")
    return as_dict(replace(one, device=device)) | {"age_seconds": age, "stale": age > 5}


def test_several_machines_of_which_one_is_silent() -> None:
    ours = [as_dict(one) | {"age_seconds": 1.0, "stale": False} for one in (sample(0), sample(1))]
    ours[1]["power_watts"] = None
    rows = [*ours, from_right(0, 840.0)]
    together = text_of(rendered(shown(devices=rows), 80, 24), 80)
    assert "3 devices of 2 machines   1 stale" in together
    assert "400/700 W (1 of 3)" in together
    assert "120/282 GiB (2 of 3)" in together
    assert "right reports nothing since 14m" in together
    assert max(map(len, together.splitlines())) <= 80
    each = text_of(rendered(shown(devices=rows, mode="per_gpu"), 100, 24), 100)
    lines = {line.split()[0]: line for line in each.splitlines() if line.strip()}
    assert "400 W" in lines[f"{HERE}/cuda:0"]
    assert "stale 14m" in lines["right/cuda:0"]
    assert "400 W" not in lines["right/cuda:0"]


def test_a_question_takes_the_place_of_the_keys() -> None:
    text = text_of(rendered(shown(message="Stop it?"), 80, 24), 80)
    assert "Stop it?" in text
    assert "q quit" not in text


def test_before_the_first_sample_and_the_first_run() -> None:
    text = text_of(rendered(shown(devices=[], trainings=[], chosen=None), 80, 24), 80)
    assert "Waiting for samples" in text
    assert "No run is known yet" in text


def test_once_printed_it_is_a_table() -> None:
    text = text_of(table_of([as_dict(one) for one in MANY], 80), 80)
    assert text.count("cuda:") == 9  # eight lines and the reason of the lost one


def test_meters_and_sparklines() -> None:
    assert meter(0.5, 8, "green").plain == "████░░░░"
    assert meter(None, 4, "green").plain == "····"
    assert sparkline([0.0, 0.5, None, 1.0, 2.0], 8, 1.0).plain == "   ▁▅ ██"
    assert sparkline([1, 2, 3], 2).plain == "▆█"
    assert sparkline([], 3).plain == "   "
    assert short_id("outputs-2026-01-31-12-00-00-0a1b2c") == "0a1b2c"


class TestTop:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Any:
        store = Store(f"sqlite:///{tmp_path / 'monitor.sqlite'}")
        store.write([sample(0), sample(1)], NOW)
        for place, (name, state) in enumerate((("old", "completed"), ("mine", "running"))):
            row = training(name, state, pid=os.getpid(), process_mark=started_at(os.getpid()))
            more = {"distributed": False, "emulated": False, "strategy": "ddp", "run_dir": "/x"}
            store.begin({**row, **more, "created": NOW - place})
        yield store
        store.close()

    def top(self, store: Store) -> tuple[Top, list[tuple[int, int]]]:
        sent: list[tuple[int, int]] = []
        top = Top(store, MonitorConfig(view="per_gpu"), lambda pid, number: sent.append((pid, number)))
        return top, sent

    def test_shows_what_is_fresh(self, store: Store) -> None:
        top, _ = self.top(store)
        now = top.look(NOW + 1)
        assert [one["device"] for one in now.devices] == ["cuda:0", "cuda:1"]
        assert set(now.history) == {f"{HERE}/0", f"{HERE}/1"}
        assert [one["name"] for one in now.trainings] == ["mine", "old"]  # what goes on comes first
        assert now.chosen == "id-mine"
        assert not any(row["stale"] for row in now.devices)
        later = top.look(NOW + 60).devices
        assert [(row["device"], row["stale"], row["age_seconds"]) for row in later] == [
            ("cuda:0", True, 60.0),
            ("cuda:1", True, 60.0),
        ]
        assert top.look(NOW + 3660).devices == []

    def test_a_toggles_the_view(self, store: Store) -> None:
        top, _ = self.top(store)
        top.press("a")
        now = top.look(NOW + 1)
        assert (now.mode, set(now.history)) == ("aggregated", {None})
        top.press("a")
        assert top.look(NOW + 1).mode == "per_gpu"

    def test_q_quits(self, store: Store) -> None:
        top, _ = self.top(store)
        assert not top.done
        top.press("q")
        assert top.done

    @pytest.mark.parametrize("key", ["s", "x"])
    def test_a_run_is_stopped_after_a_question(self, store: Store, key: str) -> None:
        top, sent = self.top(store)
        top.look(NOW)
        top.press(key)
        assert "Stop mine" in (top.look(NOW).message or "")
        top.press("n")
        assert sent == []
        top.press(key)
        top.press("y")
        assert sent == [(os.getpid(), signal.SIGTERM)]
        assert "asked to stop" in (top.look().message or "")

    def test_what_cannot_be_stopped_says_why(self, store: Store) -> None:
        top, sent = self.top(store)
        top.look(NOW)
        top.press("down")
        top.press("s")
        assert "has ended already" in (top.look().message or "")
        top.press("up")
        store.update("id-mine", process_mark="of another process")
        top.look(NOW)
        top.press("s")
        top.press("y")
        assert "gone already" in (top.look().message or "")
        store.update("id-mine", host="elsewhere")
        top.look(NOW)
        top.press("s")
        assert "on elsewhere" in (top.look().message or "")
        assert sent == []

    def test_a_choice_by_hand_stays(self, store: Store) -> None:
        top, _ = self.top(store)
        top.look(NOW)
        top.press("j")
        assert top.look(NOW).chosen == "id-old"
        top.press("k")
        assert top.look(NOW).chosen == "id-mine"


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of Unix")
def test_keys_of_a_terminal() -> None:
    ours, theirs = pty.openpty()
    try:
        keys = Keys(theirs)
        tty.setcbreak(theirs)
        assert keys.wait(0) is None
        for sent, key in ((b"a", "a"), (b"\x1b[A", "up"), (b"\x1bOB", "down"), (b"\x1b", "\x1b")):
            os.write(ours, sent)
            assert keys.wait(5) == key
    finally:
        os.close(ours)
        os.close(theirs)


def test_whether_a_process_is_still_that_one() -> None:
    mark = started_at(os.getpid())
    assert lives(os.getpid())
    assert lives(os.getpid(), mark)
    if mark is not None:
        assert not lives(os.getpid(), "0")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    if mark is not None:
        assert not lives(child)  # ended, and not collected yet
    os.waitpid(child, 0)
    assert not lives(child)
