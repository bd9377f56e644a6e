"""Interpreters whose torch is a stand-in are asked in processes of their own, as real ones are."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import wait_for

from hetexp.hardware.detection import probe
from hetexp.hardware.detection.builds import TorchBuild, read_builds
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.probe import probe_problem, torch_devices

TORCH = """
import os
from types import SimpleNamespace

class cuda:
    asked_with = dict(os.environ)

    @staticmethod
    def init():
        raise RuntimeError("Found no driver\\nand more lines")

    @staticmethod
    def device_count():
        masked = [name for name in os.environ if name.endswith("VISIBLE_DEVICES") or "AFFINITY" in name]
        return 0 if masked else {count}

    @staticmethod
    def get_device_properties(index):
        return SimpleNamespace(
            name=f"Card {{index}}, {{os.environ.get('CUDA_DEVICE_ORDER')}}",
            total_memory=8 * 2**30,
            uuid="8d5c0cd6-4c1d-0a6f-9f3c-2f5d7a0f9d6e",
            gcnArchName="gfx1100:sramecc-",
            is_integrated=0,
            pci_domain_id=0,
            pci_bus_id=3 + index,
            pci_device_id=0,
        )

{more}
"""
HIP = "__version__ = '2.13.0+rocm7.2'\ncuda = None\nhip = '7.2.1'\nxpu = None\n"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with a driver of a known version and without a card that this one may have."""
    version = tmp_path / "root" / "sys" / "module" / "amdgpu" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("6.12.12\n")
    environ = {"HETEXP_HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}
    return Machine(root=tmp_path / "root", environ=environ)


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[..., TorchBuild]:
    """Make an interpreter whose torch is a stand-in for a ROCm build."""

    def make(name: str = "one", count: int = 2, more: str = "") -> TorchBuild:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / name], check=True)
        python = tmp_path / name / "bin" / "python"
        site = next((tmp_path / name).glob("lib/python*/site-packages"))
        (site / "torch").mkdir()
        (site / "torch" / "__init__.py").write_text(TORCH.format(count=count, more=more))
        (site / "torch" / "version.py").write_text(HIP)
        (build,) = read_builds([str(python)])
        assert (build.kind, build.version, build.problem) == ("hip", "2.13.0+rocm7.2", None)
        return build

    return make


def no_process(*arguments: Any, **options: Any) -> None:
    raise AssertionError(f"a process was started: {arguments}")


def cache_file(home: Path) -> Path:
    (path,) = home.glob("cache/probe-*.json")
    return path


def test_devices_of_an_interpreter(interpreter: Callable[..., TorchBuild], machine: Machine) -> None:
    """Unmasked, in the order that the person wants, with what torch tells of each."""
    environ = dict(machine.environ, CUDA_DEVICE_ORDER="PCI_BUS_ID", HIP_VISIBLE_DEVICES="1")
    environ |= {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "0"}
    one, two = torch_devices("hip", builds=[interpreter()], machine=Machine(machine.root, environ))
    assert (one.index, two.index) == (0, 1)
    assert one.name == "Card 0, PCI_BUS_ID"
    assert (one.memory_bytes, one.uuid) == (8 * 2**30, "8d5c0cd6-4c1d-0a6f-9f3c-2f5d7a0f9d6e")
    assert (one.pci, two.pci) == ("0000:03:00.0", "0000:04:00.0")
    assert not one.integrated


def test_other_kinds_are_not_asked(interpreter: Callable[..., TorchBuild], machine: Machine) -> None:
    builds = [TorchBuild("/nowhere/python", problem="it has no torch"), TorchBuild(None, "2.13.0+cpu")]
    assert torch_devices("hip", builds=builds, machine=machine) == []
    assert torch_devices("xpu", builds=[interpreter()], machine=machine) == []
    assert probe_problem("hip", builds=builds, machine=machine) is None


def test_the_second_call_needs_no_process(
    interpreter: Callable[..., TorchBuild], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = interpreter()
    first = torch_devices("hip", builds=[build], machine=machine)
    monkeypatch.setattr("subprocess.Popen", no_process)
    assert torch_devices("hip", builds=[build], machine=machine) == first
    assert torch_devices("hip", builds=[build], machine=machine, wait=False) == first


@pytest.mark.parametrize("what", ["driver", "torch", "card", "broken", "foreign"])
def test_what_makes_an_answer_stale(
    interpreter: Callable[..., TorchBuild], machine: Machine, own_home: Path, what: str
) -> None:
    build = interpreter()
    assert len(torch_devices("hip", builds=[build], machine=machine)) == 2
    path = cache_file(own_home)
    raw = json.loads(path.read_text())
    raw["devices"] = raw["devices"][:1]  # tells a remembered answer from a new one
    path.write_text(json.dumps(raw))
    assert len(torch_devices("hip", builds=[build], machine=machine)) == 1
    if what == "driver":
        (machine.root / "sys/module/amdgpu/version").write_text("6.14.0\n")
    elif what == "torch":
        build = TorchBuild(build.python, version="2.14.1+rocm7.2", hip="7.2.1")
    elif what == "card":
        card = machine.root / "sys/bus/pci/devices/0000:03:00.0"
        card.mkdir(parents=True)
        for name, text in (("vendor", "0x1002"), ("class", "0x030000"), ("device", "0x744c")):
            (card / name).write_text(text)
    elif what == "broken":
        path.write_text(path.read_text()[:40])
    else:
        path.write_text('{"key": 1, "devices": {}}')
    assert len(torch_devices("hip", builds=[build], machine=machine)) == 2


def test_a_failure_has_a_reason_and_is_soon_tried_again(
    interpreter: Callable[..., TorchBuild],
    machine: Machine,
    own_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = interpreter(more="raise ImportError('libamdhip64.so.7: cannot open shared object file')")
    assert torch_devices("hip", builds=[build], machine=machine) == []
    told = "ImportError: libamdhip64.so.7: cannot open shared object file"
    problem = probe_problem("hip", builds=[build], machine=machine)
    assert problem == f"{build.python} (torch 2.13.0+rocm7.2): {told}"
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", no_process)
        assert torch_devices("hip", builds=[build], machine=machine) == []
    path = cache_file(own_home)
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"time": time.time() - probe.FAILURE_SECONDS - 1}))
    assert probe_problem("hip", builds=[build], machine=machine) is None
    init = Path(str(build.python)).parents[1]
    init = next(init.glob("lib/python*/site-packages/torch/__init__.py"))
    init.write_text(TORCH.format(count=1, more=""))
    assert len(torch_devices("hip", builds=[build], machine=machine)) == 1


def test_no_device_has_torchs_reason(interpreter: Callable[..., TorchBuild], machine: Machine) -> None:
    build = interpreter(count=0)
    assert torch_devices("hip", builds=[build], machine=machine) == []
    problem = probe_problem("hip", builds=[build], machine=machine)
    assert problem is not None
    assert problem.endswith(": Found no driver")


def test_what_cannot_be_started(machine: Machine) -> None:
    build = TorchBuild("/nowhere/python", version="2.13.0+rocm7.2", hip="7.2")
    assert torch_devices("hip", builds=[build], machine=machine) == []
    told = "it cannot be started: No such file or directory"
    assert told in str(probe_problem("hip", builds=[build], machine=machine))


def test_a_driver_that_hangs_costs_no_more_than_the_limit(
    interpreter: Callable[..., TorchBuild], machine: Machine
) -> None:
    """The conftest's check of left processes tells whether it was ended."""
    build = interpreter(more="import threading; threading.Event().wait()")
    assert torch_devices("hip", builds=[build], machine=machine, limit_seconds=0.3) == []
    told = "it did not answer within 0.3 s"
    assert told in str(probe_problem("hip", builds=[build], machine=machine))


def test_side_by_side(interpreter: Callable[..., TorchBuild], machine: Machine, tmp_path: Path) -> None:
    """Each answers only once the other has begun; the list of the one that sees more counts."""
    waits = """
import pathlib, sys
pathlib.Path({mine!r}).touch()
while not pathlib.Path({others!r}).exists():
    pass
"""
    files = [str(tmp_path / "started_1"), str(tmp_path / "started_2")]
    first = interpreter("one", 1, waits.format(mine=files[0], others=files[1]))
    second = interpreter("two", 3, waits.format(mine=files[1], others=files[0]))
    assert len(torch_devices("hip", builds=[first, second], machine=machine, limit_seconds=60)) == 3


def test_without_waiting(
    interpreter: Callable[..., TorchBuild], machine: Machine, own_home: Path, tmp_path: Path
) -> None:
    """A process of its own asks and remembers; what it says is there the next time."""
    gate = tmp_path / "gate"
    build = interpreter(
        more=f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists():\n    time.sleep(0.01)"
    )
    here = Machine(environ=machine.environ)  # the process looks at the real machine
    assert torch_devices("hip", builds=[build], machine=here, wait=False) == []
    with pytest.MonkeyPatch.context() as patch:  # one is at it already
        patch.setattr("subprocess.Popen", no_process)
        assert torch_devices("hip", builds=[build], machine=here, wait=False) == []
    gate.touch()
    wait_for(lambda: list(own_home.glob("cache/probe-*.json")), "an answer")
    wait_for(lambda: not list(own_home.glob("cache/*.asked")), "the end of the process")
    assert len(torch_devices("hip", builds=[build], machine=here, wait=False)) == 2
    for process in probe._ASKING:
        process.wait()


def test_a_claim_of_a_process_that_died(interpreter: Callable[..., TorchBuild], own_home: Path) -> None:
    build = interpreter()
    assert probe._claimed(build, limit_seconds=20.0)
    assert not probe._claimed(build, limit_seconds=20.0)
    assert probe._claimed(build, limit_seconds=-1.0)  # older than what any process needs


def test_a_home_that_cannot_be_written(
    interpreter: Callable[..., TorchBuild], machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path / "file"))
    build = interpreter()
    assert len(torch_devices("hip", builds=[build], machine=machine)) == 2
    assert torch_devices("hip", builds=[build], machine=machine, wait=False) == []


@pytest.mark.parametrize("capability", [(8, 6), (12, 0), (5, 2)])
def test_properties_of_cuda(capability: tuple[int, int]) -> None:
    facts = {"name": "A card", "major": capability[0], "minor": capability[1], "is_integrated": 1}
    seen = probe._seen("cuda", 3, facts)
    assert seen.architecture == f"sm_{capability[0]}{capability[1]}"
    assert (seen.index, seen.integrated) == (3, True)
    assert (seen.memory_bytes, seen.uuid, seen.pci) == (None, None, None)
