"""`hetexp diagram`: what it draws, prints and refuses, without starting anything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import checked, plan_on, unbuilt_config

from hetexp.cli import main
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.plan import calibrations
from hetexp.plan.planner import make_plan
from hetexp.report.diagram.files import NO_DOT, has_dot

TINY = ("model=mlp", "data=synthetic", "logger=none")
MIX = ("hardware=nvidia_arc", *TINY, "model.hidden_sizes=[512,512]", "trainer.global_batch_size=4096")


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("hetexp.launch.processes.members.start_rank", never)


def drawn(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    """Return the Mermaid text that comes of some words."""
    assert main(["diagram", *words, "--format", "mmd", "--output", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'plan.mmd'}\n"
    return (folder / "plan.mmd").read_text(encoding="utf-8")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["diagram", *words]) == 2
    screen = capsys.readouterr()
    assert screen.out == ""
    assert "Traceback" not in screen.err
    return screen.err


def test_the_split_is_the_catalogues_where_a_run_would_measure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = drawn(capsys, tmp_path / "new" / "folder", *MIX)
    assert "A run measures its devices first (balancing=auto)" in text
    assert "from the catalogue" in text
    assert "EMULATED" in text
    assert sum(map(int, re.findall(r"% · (\d+) samples", text))) == 4096


def test_what_was_measured_is_what_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = checked(*MIX, run_dir=tmp_path).accepted()
    curves = [DeviceCalibration(SpeedCurve(0.0, s), 0.5, 0.0, 0.0) for s in (1e-4, 3e-4)]
    told = {"devices": [one.to_dict() for one in curves], "exchange": Exchange().to_dict()}
    calibrations.store(make_plan(spec), spec.config, told)
    text = drawn(capsys, tmp_path, *MIX)
    assert "A run measures" not in text
    assert "75.0% · 3072 samples a step" in text


def test_nothing_is_known_of_cpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = drawn(capsys, tmp_path, *TINY, "hardware.devices=[cpu,cpu]")
    assert "nothing is known of cpu:0, cpu:1" in text.replace("<br/>", " ")
    assert text.count("50.0%") == 2


def test_stages_of_the_strategy_that_is_picked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = ("model=gpt", "model.embedding_size=16", "data=synthetic", "data.kind=tokens")
    words = ("hardware=nvidia_arc", *model, "strategy=auto", "strategy.among=[pipeline]", "balancing=equal")
    text = drawn(capsys, tmp_path, *words)
    assert "strategy=auto takes pipeline" in text.replace("<br/>", " ")
    assert "strategy pipeline · balancing equal" in text
    assert "stage 0: layers 0–1" in text
    assert "d0 ==>" in text


@pytest.mark.parametrize("what", ["folder", "file"])
def test_the_plan_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, what: str) -> None:
    run = tmp_path / "a=b"  # as a sweep may name its folders
    run.mkdir()
    plan_on([CpuBackend.describe(0)], unbuilt_config(), name="my run").write(run / "plan.json")
    given = run if what == "folder" else run / "plan.json"
    assert main(["diagram", str(given)]) == 0
    screen = capsys.readouterr()
    expected = ["plan.mmd", "plan.svg"] if has_dot() else ["plan.mmd"]
    assert screen.out.split() == [str(run / name) for name in expected]
    assert 'title: "my run"' in (run / "plan.mmd").read_text(encoding="utf-8")


def test_without_dot(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not asked for is no failure; what was asked for is."""
    plan_on([CpuBackend.describe(0)], unbuilt_config()).write(tmp_path / "plan.json")
    monkeypatch.setenv("PATH", str(tmp_path))
    for words, code in ([], 0), (["--format", "mmd,png"], 1):
        assert main(["diagram", str(tmp_path), *words]) == code
        screen = capsys.readouterr()
        assert screen.out == f"{tmp_path / 'plan.mmd'}\n"
        assert screen.err == f"{NO_DOT}\n"


def test_every_mistake_is_told_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = refused(
        capsys,
        "hardware=nvidia_arx",
        "strategy=dpp",
        "--format",
        "svg,gif",
        "--output",
        str(tmp_path / "file"),
    )
    assert "Did you mean `nvidia_arc`?" in told
    assert "`strategy` must be one of" in told
    assert "`--format` must be some of mmd, svg, png, pdf, with commas between, but is 'svg,gif'" in told
    assert "`--output` must be a folder that can be written" in told


@pytest.mark.parametrize("content", [None, "no json", json.dumps({"devices": []}), "[]"])
def test_what_is_no_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    told = refused(capsys, str(tmp_path))
    assert "`CONFIG` must be overrides, a run folder or its plan.json, but is" in told
    assert ("There is no" in told) == (content is None)


def test_a_word_that_is_no_override(capsys: pytest.CaptureFixture[str]) -> None:
    assert "There is no nvidia_arc" in refused(capsys, "nvidia_arc")


def test_what_does_not_fit_is_refused_as_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    small = "hardware.devices=[{device:emulated:rtx_3090,memory_gib:0.001},emulated:arc_a770]"
    assert "memory" in refused(capsys, small, *TINY, "balancing=equal")
