"""`hetexp doctor` on recorded machines: what it shows, what it finds, and that no check ends the others."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

import hetexp
from hetexp.cli import main
from hetexp.commands import doctor
from hetexp.commands.doctor import examine
from hetexp.commands.support import checks
from hetexp.commands.support.checks import CHECKS, Context
from hetexp.commands.support.interpreters import Interpreter
from hetexp.commands.support.section import Problem, Section
from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.detection.builds import TorchBuild
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.inventory import Inventory
from hetexp.hardware.detection.machine import Machine

RTX = DeviceSpec("cuda:0", "cuda", 0, "RTX 3090", "nvidia", 24 * GIB, driver="580.65.06", number=0)
ARC = DeviceSpec("xpu:0", "xpu", 0, "Arc A770", "intel", number=1)
IGPU = DeviceSpec("xpu:1", "xpu", 1, "Iris Xe", "intel", number=2, integrated=True)
NO_BUILD = "torch 2.13.0+cpu is not built for XPU; run: hetexp env create xpu"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """A machine with a processor, a folder to work in, and nothing else."""
    for name, text in {
        "etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12"\n',
        "proc/meminfo": "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n",
    }.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path / "work").mkdir()
    context = Context(
        Machine(root=tmp_path / "root", environ={"PATH": os.environ["PATH"]}), tmp_path / "work"
    )
    context.inventory = Inventory()
    context.interpreters = [Interpreter("this", "/own/python", TorchBuild(None, "2.13.0+cpu"), "3.11.7")]
    return context


def found(context: Context, title: str) -> Section:
    section = Section(title)
    CHECKS[title](context, section)
    return section


def rows(section: Section) -> dict[str, str]:
    return dict(section.rows)


# ---------------------------------------------------------------- the whole


def test_every_check_fills_its_section(context: Context) -> None:
    """Here, on the machine that runs this test, with its real processes for the exchange."""
    sections = examine(context)
    assert [section.title for section in sections] == list(CHECKS)
    assert all(section.rows for section in sections)
    assert not [problem for section in sections for problem in section.problems if problem.blocks]


def test_a_check_that_crashes_is_told_and_no_more(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(context: Context, section: Section) -> None:
        section.row("before", "it crashed")
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(checks, "CHECKS", {"one": crash, "two": lambda _, section: section.row("a", "b")})
    one, two = examine(context)
    assert one.rows == [("before", "it crashed"), ("check", "failed: RuntimeError: no such thing")]
    (problem,) = one.problems
    assert problem.text.startswith("The check 'one' failed (RuntimeError: no such thing).")
    assert not problem.blocks
    assert two.rows == [("a", "b")]


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch) -> list[Section]:
    """What the command is going to print."""
    made = [Section("cards", [("0 cuda:0", "RTX 3090")])]
    monkeypatch.setattr(doctor, "examine", lambda: made)
    return made


def test_nothing_to_fix(sections: list[Section], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "cards\n  0 cuda:0        RTX 3090\n\nNothing to fix.\n"


@pytest.mark.parametrize(("blocks", "code"), [(False, 0), (True, 1)])
def test_what_to_fix(
    sections: list[Section], capsys: pytest.CaptureFixture[str], blocks: bool, code: int
) -> None:
    """A command is on a line of its own and never cut; the exit code says whether training can run."""
    command = f"hetexp env create xpu --path {'/a/long/folder' * 12}"
    sections[0].problem("The Arc [A770] cannot be used", command, blocks)
    sections[0].problem("Another thing")
    assert main(["doctor"]) == code
    screen = capsys.readouterr().out
    assert "1. The Arc [A770] cannot be used." in screen
    assert f"\n   {command}\n" in screen
    assert "2. Another thing.\n" in screen
    assert ("No training can run until then." in screen) == blocks
    assert ("Training can run as it is." in screen) == (not blocks)


def test_json(sections: list[Section], capsys: pytest.CaptureFixture[str]) -> None:
    sections[0].problem("A thing", "a command", True)
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ready": False,
        "sections": [
            {
                "title": "cards",
                "rows": [["0 cuda:0", "RTX 3090"]],
                "problems": [{"text": "A thing.", "fix": "a command", "blocks": True}],
            }
        ],
    }


def test_plain_text_without_a_terminal(
    sections: list[Section], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    sections[0].problem("A thing", "a command", True)
    main(["doctor"])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100])
def test_lines_fit_the_terminal(
    sections: list[Section], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    sections[0].row("1 xpu:0", " ".join(["word"] * 60))
    sections[0].problem(" ".join(["word"] * 60))
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith(" " * 18 + "word") for line in lines) >= 3  # beside the label, not below it


def test_an_interpreter_without_its_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checks themselves could not be imported then."""

    def lacks() -> None:
        raise SetupError("This interpreter, /own/python, lacks pydantic. Install …")

    monkeypatch.setattr("hetexp.launch.environments.interpreter.check_own_interpreter", lacks)
    assert main(["doctor"]) == 1
    assert "lacks pydantic" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ready"] is False


# ---------------------------------------------------------------- single checks


def versions(monkeypatch: pytest.MonkeyPatch, **others: str) -> None:
    known = {
        "hydra-core": "1.3.8",
        "omegaconf": "2.3.1",
        **{k.replace("_", "-"): v for k, v in others.items()},
    }

    def version(name: str) -> str:
        if name not in known:
            raise PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(checks, "version", version)


def test_packages_in_range(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch)
    section = found(context, "hetexp")
    assert section.problems == []
    assert rows(section)["hetexp"].startswith(f"{hetexp.__version__} (clone ")
    assert rows(section)["Python"].endswith(f"({sys.executable})")
    assert rows(section)["hydra-core"] == "1.3.8"
    assert rows(section)["pyzes"] == "not installed"


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("hydra_core", "1.3.0", "hydra-core must be >=1.3.8,<1.4, but is 1.3.0 instead."),
        ("hydra_core", "1.4.0.dev1", "hydra-core must be >=1.3.8,<1.4, but is 1.4.0.dev1 instead."),
        ("omegaconf", "2.4.0", "omegaconf must be >=2.3,<2.4, but is 2.4.0 instead."),
    ],
)
def test_packages_out_of_range(
    context: Context, monkeypatch: pytest.MonkeyPatch, name: str, version: str, told: str
) -> None:
    versions(monkeypatch, **{name: version})
    (problem,) = found(context, "hetexp").problems
    assert problem.text == told
    assert problem.blocks
    assert problem.fix is not None
    assert problem.fix.startswith(f"{sys.executable} -m pip install '{name.replace('_', '-')}>=")


def test_the_wrong_pynvml(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-ml-py is imported as pynvml; the package of that name is another one."""
    versions(monkeypatch, nvidia_ml_py="13.615.71", pynvml="13.0.1")
    (problem,) = found(context, "hetexp").problems
    assert "pynvml" in problem.text
    assert "uninstall -y pynvml" in str(problem.fix)
    assert not problem.blocks


def test_the_machine(context: Context) -> None:
    told = rows(found(context, "machine"))
    assert told["system"].startswith("Debian GNU/Linux 12, ")
    assert told["memory"] == "16.0 GiB, 8.0 GiB available"
    assert told["cores"].endswith(f" usable of {os.cpu_count()}")


def test_cards(context: Context) -> None:
    """Each with its state; to fix is what could be used and is not."""
    context.inventory = Inventory(
        [
            DetectedCard(RTX, hidden_by="CUDA_VISIBLE_DEVICES="),
            DetectedCard(ARC, unusable=NO_BUILD),
            DetectedCard(IGPU, unusable=NO_BUILD),
            DetectedCard(DeviceSpec("cuda:1", "cuda", 1, "RTX 3080", "nvidia", number=3), lost="GPU is lost"),
        ],
        {"cuda": ["CUDA_VISIBLE_DEVICES names no card"]},
    )
    section = found(context, "cards")
    told = rows(section)
    assert told["0 cuda:0"] == "RTX 3090, 24.0 GiB, driver 580.65.06; hidden by CUDA_VISIBLE_DEVICES="
    assert told["1 xpu:0"] == f"Arc A770, memory not known; unusable: {NO_BUILD}"
    assert told["3 cuda:1"].endswith("; lost: GPU is lost")
    assert section.problems == [
        Problem(
            "xpu:0 (Arc A770) cannot be used: torch 2.13.0+cpu is not built for XPU.", "hetexp env create xpu"
        ),
        Problem("cuda:1 (RTX 3080) cannot be used: lost: GPU is lost."),
        Problem("The variables that hide cuda cards are wrong: CUDA_VISIBLE_DEVICES names no card."),
    ]


def test_no_cards(context: Context) -> None:
    section = found(context, "cards")
    assert rows(section)["cards"].startswith("none")
    assert section.problems == []


def test_drivers(context: Context) -> None:
    root = context.machine.root
    nvidia = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:16:25 UTC 2025\nGCC 12\n"
    )
    for name, text in {
        "proc/driver/nvidia/version": nvidia,
        "sys/module/amdgpu/version": "6.12.12\n",
    }.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    (root / "sys/module/i915").mkdir(parents=True)
    told = rows(found(context, "drivers"))
    assert (told["nvidia"], told["amdgpu"], told["xe"]) == ("580.65.06", "6.12.12", "not loaded")
    assert told["i915"] == f"of kernel {os.uname().release}"


def test_the_open_kernel_module_of_nvidia(context: Context) -> None:
    path = context.machine.root / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root)\n"
    )
    assert rows(found(context, "drivers"))["nvidia"] == "580.159.04"


def test_nodes_that_may_not_be_opened(context: Context) -> None:
    for name in ("dev/kfd", "dev/dri/renderD128"):
        (context.machine.root / name).parent.mkdir(exist_ok=True, parents=True)
        (context.machine.root / name).touch()
    context.machine = replace(context.machine, may_open=lambda path: path.name != "renderD128")
    section = found(context, "drivers")
    assert rows(section)["/dev/kfd"] == "may be opened"
    assert rows(section)["/dev/dri/renderD128"] == "may not be opened by this user"
    assert section.problems == []  # no card that needs it
    context.inventory = Inventory([DetectedCard(ARC)])
    (problem,) = found(context, "drivers").problems
    assert "/dev/dri/renderD128" in problem.text
    assert "usermod" in str(problem.fix)


def test_interpreters(context: Context) -> None:
    context.interpreters += [
        Interpreter(
            "cuda", "/c/python", TorchBuild("/c/python", "2.13.0+cu130", cuda="13.0"), devices=["cuda:0"]
        ),
        Interpreter("rocm", "/gone/python", TorchBuild("/gone/python", problem="No such file")),
    ]
    section = found(context, "interpreters")
    told = rows(section)
    assert told["this"] == "torch 2.13.0+cpu for CPU, drives no card of this machine (/own/python)"
    assert told["cuda"] == "torch 2.13.0+cu130 for CUDA 13.0, drives cuda:0 (/c/python)"
    assert told["rocm"] == "cannot be used: No such file (/gone/python)"
    (problem,) = section.problems
    assert (problem.fix, problem.blocks) == ("hetexp env create rocm --force", False)


def test_an_interpreter_without_torch_cannot_train(context: Context) -> None:
    context.interpreters[0].build = TorchBuild(None, problem="it has no torch")
    (problem,) = found(context, "interpreters").problems
    assert problem.blocks


def test_the_exchange(context: Context) -> None:
    told = rows(found(context, "exchange"))
    assert told["gloo"] == "works between two processes on 'lo'"
    assert told["torch has"].startswith("gloo")


def test_an_exchange_on_an_interface_that_is_not_there(context: Context) -> None:
    environ = {**context.machine.environ, "GLOO_SOCKET_IFNAME": "nowhere0"}
    context.machine = Machine(root=context.machine.root, environ=environ)
    (problem,) = found(context, "exchange").problems
    assert "by gloo on 'nowhere0'" in problem.text
    assert (problem.fix, problem.blocks) == ("unset GLOO_SOCKET_IFNAME", True)


def test_an_exchange_that_hangs(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conftest's check of left processes tells whether both were ended."""
    monkeypatch.setattr(checks, "EXCHANGE_SECONDS", 0.2)
    monkeypatch.setattr(checks, "_EXCHANGE", "import time; time.sleep(60)")
    (problem,) = found(context, "exchange").problems
    assert "no answer within 0.2 s" in problem.text
    monkeypatch.setattr(checks, "_EXCHANGE", "raise ImportError('libgomp.so.1')")
    monkeypatch.setattr(checks, "EXCHANGE_SECONDS", 60.0)
    (problem,) = found(context, "exchange").problems
    assert "ImportError: libgomp.so.1" in problem.text


def test_room(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    section = found(context, "room")
    assert rows(section)["run folders"] == str(context.folder / "outputs")
    assert section.problems == []
    (context.folder / "outputs").write_text("")
    (problem,) = found(context, "room").problems
    assert problem.blocks
    assert "is a file" in problem.text
    (context.folder / "outputs").unlink()
    usage = SimpleNamespace(free=20 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(checks, "SHARED_MEMORY", context.folder)
    (problem,) = found(context, "room").problems
    assert f"{context.folder} has room for 2 data loader processes" in problem.text
    assert not problem.blocks


def test_few_open_files(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (64, 64))
    (problem,) = found(context, "room").problems
    assert problem.text == "A process must be allowed at least 256 open files, but the limit is 64."
    assert (problem.fix, problem.blocks) == ("ulimit -n 1024", True)


def test_offline_runs_of_wandb(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, wandb="0.31.0")
    for place in ("2026-01-01/one", "2026-01-01/two", "sweeps/2026-01-01/a_sweep/0-seed=0"):
        run = context.folder / "outputs" / place / "wandb" / "offline-run-20260101_000000-x"
        run.mkdir(parents=True)
        (run / "run-x.wandb").touch()
    (run / "run-x.wandb.synced").touch()
    told = rows(found(context, "W&B"))
    assert told["wandb"] == "0.31.0"
    assert told["mode"].startswith("offline, since neither")
    assert told["offline runs"] == f"2 of 3 below {context.folder} not uploaded"
    assert told["to upload them"] == "hetexp sync outputs"
    versions(monkeypatch)
    assert list(rows(found(context, "W&B"))) == ["wandb"]


def test_variables_without_secrets(context: Context, own_home: Path) -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "1",
        "WANDB_API_KEY": "hush-hush",
        "AWS_SECRET_ACCESS_KEY": "hush-hush",
        "HETEXP_HOME": str(own_home),
    }
    context.machine = Machine(root=context.machine.root, environ=environ)
    section = found(context, "variables")
    told = rows(section)
    assert told["CUDA_VISIBLE_DEVICES"] == "(empty)"
    assert told["HIP_VISIBLE_DEVICES"] == "1"
    assert told["WANDB_API_KEY"] == "set"
    assert told["hetexp's files"] == f"{own_home} (HETEXP_HOME)"
    assert "hush" not in str(section)
    assert "AWS_SECRET_ACCESS_KEY" not in str(section)


def test_a_home_that_cannot_be_written(context: Context, own_home: Path) -> None:
    own_home.write_text("")
    (problem,) = found(context, "variables").problems
    assert problem.fix == "export HETEXP_HOME=FOLDER"
