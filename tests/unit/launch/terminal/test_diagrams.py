"""A run's own diagrams: written beside its start, told once where they cannot be, and never its end."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support import plan_on, unbuilt_config

from hetexp.core.config import Config, read_config
from hetexp.core.plan import Plan
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.terminal.diagrams import diagrams
from hetexp.report.diagram.files import has_dot


def made(folder: Path, **settings: bool) -> tuple[Plan, Config]:
    folder.mkdir(exist_ok=True)
    raw = unbuilt_config(**settings)
    return plan_on([CpuBackend.describe(0)], raw, run_dir=str(folder)), read_config(raw)


def drawn(plan: Plan, config: Config) -> str:
    """Return what is said on the screen."""
    screen = io.StringIO()
    with diagrams(plan, config, Console(file=screen, width=200)):
        pass
    return screen.getvalue()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("plan.*"))


@pytest.fixture(autouse=True)
def no_hint_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path / "home"))


@pytest.mark.skipif(not has_dot(), reason="Graphviz is not installed")
def test_all_formats_are_there_when_the_run_has_ended(tmp_path: Path) -> None:
    assert drawn(*made(tmp_path)) == ""
    assert names(tmp_path) == ["plan.mmd", "plan.pdf", "plan.png", "plan.svg"]


def test_mermaid_is_there_before_the_ranks_start(tmp_path: Path) -> None:
    with diagrams(*made(tmp_path), Console(file=io.StringIO())):
        assert "plan.mmd" in names(tmp_path)


def test_not_where_nobody_wants_it_or_devices_are_only_measured(tmp_path: Path) -> None:
    plan, config = made(tmp_path, diagram=False)
    assert drawn(plan, config) == ""
    plan, config = made(tmp_path)
    assert drawn(replace(plan, measuring=True), config) == ""
    assert names(tmp_path) == []


def test_an_absent_dot_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    first = drawn(*made(tmp_path / "0"))
    assert first.count("\n") == 1
    assert "apt install graphviz" in first
    assert drawn(*made(tmp_path / "1")) == ""
    assert names(tmp_path / "1") == ["plan.mmd"]


def test_a_failing_dot_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dot").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    told = drawn(*made(tmp_path / "run"))
    assert told.startswith("plan.svg is not drawn: dot says 'it ended with 1'.")
    assert names(tmp_path / "run") == ["plan.mmd"]


def test_nothing_about_a_drawing_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("odd plan")

    monkeypatch.setattr("hetexp.report.diagram.files.picture_of", broken)
    assert drawn(*made(tmp_path)) == "The plan is not drawn: RuntimeError: odd plan.\n"


def test_what_ends_a_run_goes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), diagrams(*made(tmp_path), Console(file=io.StringIO())):
        raise KeyboardInterrupt
