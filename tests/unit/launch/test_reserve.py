"""A sweep's jobs get devices that nobody else holds, also where several of them choose at the same time."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hetexp.core.config import COMPONENTS, read_config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.detection.busy import who_is_busy
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.inventory import Inventory, numbered
from hetexp.hardware.detection.lease import Leases, holder
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.selection.devices import select_devices
from hetexp.launch import reserve
from hetexp.launch.reserve import Check, reserved
from hetexp.plan.run_spec import CheckedRun, Request, RunSpec

UNBUILT: dict[str, Any] = {
    **{name: {"_target_": "unused"} for name in COMPONENTS},
    "trainer": {"global_batch_size": 8, "max_steps": 1},
}
"""Not from `support`, which imports torch: three processes below would wait for it."""
TESTS = Path(__file__).parents[2]
SECONDS = 60.0
"""Longest time for what must happen, on however busy a machine."""


def cards(*vendors: str) -> list[DeviceSpec]:
    backends = {"nvidia": "cuda", "intel": "xpu"}
    found = []
    for i, vendor in enumerate(vendors):
        spec = DeviceSpec("", backends[vendor], i, f"{vendor} card", vendor, uuid=f"test-{i}")
        found.append(DetectedCard(replace(spec, pci=f"0000:0{i}:00.0")))
    return [card.spec for card in numbered(found)]


def check_of(hardware: dict[str, Any], specs: list[DeviceSpec], root: Path, **sweep: Any) -> Check:
    """Return what checks a run as `hetexp.app.check` does, on these cards."""
    config = read_config({**UNBUILT, "hardware": {"devices": ["cpu"], **hardware}, "sweep": sweep})

    def check(leases: bool) -> CheckedRun:
        busy = who_is_busy(Machine(root=root), leases=leases)
        found = [DetectedCard(spec) for spec in specs]
        inventory = Inventory([DetectedCard(one.spec, busy=busy(one)) for one in found])
        selection = select_devices(config.hardware, inventory)
        spec = RunSpec(config, {}, selection, Request(root / "run", root))
        return CheckedRun(spec, list(selection.problems))

    return check


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(reserve, "POLL_SECONDS", 0.01)
    (tmp_path / "sweep").mkdir()


def request_of(tmp_path: Path, job: str = "0") -> Request:
    return Request(tmp_path / "sweep" / job, tmp_path, sweep=tmp_path / "sweep")


class Screen(io.StringIO):
    """What is printed, and an event once somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def write(self, text: str) -> int:
        if "waits for" in text:
            self.waits.set()
        return super().write(text)


@contextmanager
def held(specs: list[DeviceSpec]) -> Iterator[threading.Event]:
    """Let another run hold cards until the event is set, or the end."""
    free = threading.Event()
    taken = threading.Event()

    def hold() -> None:
        with Leases(specs, "outputs/another"):
            taken.set()
            free.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(SECONDS)
    try:
        yield free
    finally:
        free.set()
        thread.join()


@pytest.mark.parametrize(
    ("hardware", "chosen"),
    [
        ({"devices": ["auto"]}, ["cuda:1", "xpu:0"]),
        ({"gpu_ids": "available"}, ["cuda:1", "xpu:0"]),
        ({"gpu_ids": "recommend:2"}, ["cuda:1", "xpu:0"]),
        ({"devices": [{"vendor": "nvidia"}]}, ["cuda:1"]),
        ({"devices": [{"vendor": "nvidia", "count": 1}, {"vendor": "intel"}]}, ["cuda:1", "xpu:0"]),
    ],
)
def test_where_the_wish_leaves_a_choice_another_card_is_taken(
    tmp_path: Path, hardware: dict[str, Any], chosen: list[str]
) -> None:
    specs = cards("nvidia", "nvidia", "intel")
    screen = Screen()
    with held(specs[:1]):
        check = check_of(hardware, specs, tmp_path)
        with reserved(check, request_of(tmp_path), Console(file=screen)) as found:
            devices = found.accepted().selection.devices
            assert [device.id for device in devices] == chosen
            # The launcher of this process needs no other leases for them, and finds them free.
            with Leases(devices, "within"):
                assert [holder(device) for device in devices] == [None] * len(chosen)
            assert found.problems == []
        assert not screen.getvalue()
    with Leases(specs, "afterwards"):
        pass


@pytest.mark.parametrize(
    "hardware",
    [
        {"gpu_ids": [0]},
        {"gpu_ids": "all"},
        {"gpu_ids": "recommend:2"},
        {"devices": ["cuda:0"]},
        {"devices": [{"vendor": "nvidia", "count": 2}]},
    ],
)
def test_where_it_leaves_none_the_job_waits(tmp_path: Path, hardware: dict[str, Any]) -> None:
    specs = cards("nvidia", "nvidia")
    screen = Screen()
    with held(specs[:1]) as free:

        def end() -> None:
            assert screen.waits.wait(SECONDS)
            free.set()

        other = threading.Thread(target=end)
        other.start()
        check = check_of(hardware, specs, tmp_path)
        console = Console(file=screen, width=200)
        with reserved(check, request_of(tmp_path, "4"), console) as found:
            assert not found.problems
            assert found.accepted().selection.devices[0].id == "cuda:0"
        other.join()
    told = screen.getvalue()
    assert told.startswith("4 waits for cuda:0 (nvidia card), held by the run outputs/another (process ")
    assert told.count("waits for") == 1


def test_it_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    specs = cards("nvidia")
    with held(specs):
        check = check_of({"devices": ["auto"]}, specs, tmp_path, wait_seconds=0.05)
        console = Console(file=io.StringIO())
        told = r"^cuda:0 .*held by .*not free within 0.05 s \(sweep.wait_seconds\)"
        with (
            pytest.raises(SetupError, match=told),
            reserved(check, request_of(tmp_path), console),
        ):
            pass


def test_what_waiting_would_not_mend_is_told_at_once(tmp_path: Path) -> None:
    specs = cards("nvidia")
    with held(specs):
        check = check_of({"gpu_ids": [3]}, specs, tmp_path)
        with reserved(check, request_of(tmp_path), Console(file=io.StringIO())) as found:
            assert "`hardware.gpu_ids` must be" in found.problems[0]


def test_outside_a_sweep_nothing_is_taken_or_waited_for(tmp_path: Path) -> None:
    specs = cards("nvidia")
    alone = Request(tmp_path / "run", tmp_path)
    with held(specs):
        check = check_of({"devices": ["auto"]}, specs, tmp_path)
        with reserved(check, alone, Console(file=io.StringIO())) as found:
            assert "all are busy" in found.problems[0]


def test_shared_cards_are_not_waited_for(tmp_path: Path) -> None:
    specs = cards("nvidia")
    with held(specs):
        check = check_of({"gpu_ids": [0], "share_devices": True}, specs, tmp_path)
        with reserved(check, request_of(tmp_path), Console(file=io.StringIO())) as found:
            assert not found.problems


@pytest.mark.parametrize("devices", [["cpu"], ["emulated:rtx_3090"], ["cuda:0", "cpu"]])
def test_the_cpu_is_one_jobs_at_a_time(tmp_path: Path, devices: list[str]) -> None:
    specs = cards("nvidia")
    request, other = request_of(tmp_path, "0"), request_of(tmp_path, "1")
    slot = tmp_path / "sweep" / ".cpu"
    one_cpu = [DeviceSpec("cpu:0", "cpu", 0, "CPU", "cpu")]
    hardware = {"devices": devices}
    with Leases(one_cpu, str(other.run_dir), slot):
        waiting = check_of(hardware, specs, tmp_path, wait_seconds=0.02)
        told = "this machine's CPU, held by the run .*sweep/1 "
        with pytest.raises(SetupError, match=told), reserved(waiting, request, Console(file=io.StringIO())):
            pass
        with Leases(specs, "nobody took a part of it"):
            pass
        shared = check_of(hardware, specs, tmp_path, share_cpu=True)
        with reserved(shared, request, Console(file=io.StringIO())) as found:
            assert not found.problems
        elsewhere = Request(
            tmp_path / "b" / "0", tmp_path, sweep=tmp_path / "b"
        )  # another sweep's jobs are its own
        (tmp_path / "b").mkdir()
        with reserved(check_of(hardware, specs, tmp_path), elsewhere, Console(file=io.StringIO())) as found:
            assert not found.problems


JOB = """
import sys, tempfile
from pathlib import Path
tempfile.tempdir = sys.argv[1]
sys.path.insert(0, sys.argv[3])
sys.path.insert(0, sys.argv[3] + "/unit/launch")
from test_reserve import Console, cards, check_of, request_of, reserved
root = Path(sys.argv[1])
check = check_of({"gpu_ids": "recommend:1"}, cards("nvidia", "nvidia"), root)
print("ready", flush=True)
sys.stdin.readline()
with reserved(check, request_of(root, sys.argv[2]), Console(width=200)) as found:
    print(found.accepted().selection.devices[0].id, flush=True)
    sys.stdin.readline()
"""


def test_processes_at_the_same_time_never_take_the_same_card(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir(exist_ok=True)
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(tmp_path), str(number), str(TESTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for number in range(3)
    ]

    def said(job: subprocess.Popen[str]) -> str:
        assert job.stdout is not None
        return job.stdout.readline().strip()

    def go_on(job: subprocess.Popen[str]) -> None:
        assert job.stdin is not None
        print(file=job.stdin, flush=True)

    try:
        assert [said(job) for job in jobs] == ["ready"] * 3
        for job in jobs:
            go_on(job)
        first = {job: said(job) for job in jobs}
        (late,) = [job for job, text in first.items() if "waits for cuda:" in text]
        early = {text: job for job, text in first.items() if job is not late}
        assert set(early) == {"cuda:0", "cuda:1"}
        go_on(early["cuda:1"])
        assert early["cuda:1"].wait(SECONDS) == 0
        while (text := said(late)) and "waits" in text:
            pass
        assert text == "cuda:1"
        go_on(late)
        go_on(early["cuda:0"])
        assert [job.wait(SECONDS) for job in jobs] == [0, 0, 0]
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
