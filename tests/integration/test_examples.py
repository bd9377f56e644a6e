"""The scripts in `examples/` run alone and on a mix, and learn something."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import start_script

import hetexp

ROOT = Path(hetexp.__file__).resolve().parent.parent
MIX = ("hardware.devices=[cpu,cpu]", "balancing=manual", "balancing.weights=[0.7,0.3]")


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", text)]


def test_plain_loop_as_a_person_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By itself, and by the command, with an interpreter of its own for a device."""
    script = str(ROOT / "examples" / "plain_loop.py")
    launch = "import sys; from hetexp.cli import main; sys.exit(main())"
    python = f"{{device: cpu, python: '{sys.executable}'}}"
    options = [f"hardware.devices=[cpu,{python}]", "balancing=equal", "logger=none", "hydra.run.dir=run"]
    ended = subprocess.run(
        [sys.executable, "-c", launch, "launch", script, *options, "--", "--epochs", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "run" / "summary.json").exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [script, "--epochs", "2"])
    runpy.run_path(script, run_name="__main__")
    told = losses(capsys.readouterr().out)
    assert len(told) == 2
    assert told[1] < told[0] < 1.0
    assert list((tmp_path / "outputs").rglob("model.safetensors"))
    # float32 on other shares: the same but for rounding.
    printed = "\n".join(line for line in ended.stdout.splitlines() if line.startswith("epoch"))
    assert losses(printed) == pytest.approx(told, abs=2e-3)


def test_custom_loss(tmp_path: Path) -> None:
    run = start_script(tmp_path / "run", ROOT / "examples" / "custom_loss.py", MIX, "--steps", "40")
    assert run.summary["steps"] == 40
    told = [row["focal"] for row in run.metrics if "focal" in row]
    assert len(told) == 2
    assert told[1] < 0.7 * told[0]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_hugging_face(tmp_path: Path) -> None:
    run = start_script(tmp_path / "run", ROOT / "examples" / "hugging_face.py", MIX, "--steps", "20")
    told = [row["loss"] for row in run.metrics if "loss" in row]
    assert run.summary["steps"] == 20
    assert told[-1] < 4.5  # of 256 bytes, knowing nothing: 5.55
    assert "'import " in run.screen


@pytest.mark.timeout(300)
def test_the_notebook_compares_one_device_with_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer steps and a small time scale: whether its runs are valid is not tested."""
    nbformat = pytest.importorskip("nbformat", reason="the extra `notebook` is not installed")
    nbclient = pytest.importorskip("nbclient", reason="the extra `notebook` is not installed")
    pytest.importorskip("ipykernel", reason="the extra `notebook` is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "examples" / "two_devices.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for value, smaller in (
        ("STEPS = 30", "STEPS = 6"),
        ('"logger=none"', '"logger=none", "hardware.time_scale=4"'),
    ):
        (cell,) = (cell for cell in code if value in cell.source)
        cell.source = cell.source.replace(value, smaller)
    folder = tmp_path / "examples"
    folder.mkdir()
    kernel = nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(folder)}})
    kernel.execute()
    shown = [out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", ())]
    (table,) = (data["text/markdown"] for data in shown if "text/markdown" in data)
    assert {line.split("|")[1].strip() for line in table.splitlines()[2:]} == {"ddp", "single"}
    (image,) = (data["image/svg+xml"] for data in shown if "image/svg+xml" in data)
    assert "emulated" in image
    assert (tmp_path / "outputs" / "sweeps" / "notebook" / "report.html").exists()
