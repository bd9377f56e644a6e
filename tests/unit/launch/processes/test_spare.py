"""A process that waits with everything imported, and becomes a rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from launched import wait_for
from support import plan_on, unbuilt_config

from hetexp.core.plan import Plan
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.processes import spare as module
from hetexp.launch.processes.members import start_member, start_of
from hetexp.launch.processes.process import Start
from hetexp.launch.processes.spare import Spares

LAUNCH = {"timeout_seconds": 0.1}
"""No store answers: a rank ends at once."""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    made = plan_on([CpuBackend.describe(0)], unbuilt_config(launch=LAUNCH), run_dir=str(tmp_path))
    made = replace(made, working_dir=str(tmp_path), import_paths=(str(tmp_path),))
    (tmp_path / "logs").mkdir()
    made.write(tmp_path / "plan.json")
    return made


@pytest.fixture
def spares(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spares]:
    monkeypatch.setattr(module, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(module, "LEAST_BYTES", 0)
    made = Spares("subprocess")
    yield made
    made.close()


def start(plan: Plan) -> Start:
    return start_of(plan, Path(plan.run_dir) / "plan.json", 0, "")


def test_a_process_becomes_a_rank(plan: Plan, spares: Spares) -> None:
    """The rank finds no launcher; its log and its failure are those of the member."""
    spares.keep(iter([start(plan)]))
    member = start_member(plan, Path(plan.run_dir) / "plan.json", 0, "subprocess", "", 7, True, spares)
    assert spares.take(sys.executable) is None
    assert wait_for(member.process.poll, "the rank has ended") == 1
    failure = json.loads((Path(plan.run_dir) / "logs" / "rank_7.failure.json").read_text())
    assert failure["rank"] == 7
    assert "Traceback" in member.log_path.read_text()


def test_a_process_that_is_not_needed_is_ended(plan: Plan, spares: Spares) -> None:
    spares.keep(iter([start(plan)]))
    spares.keep(iter([start(plan)]))  # at once: too early for another
    taken = spares.take(sys.executable)
    assert taken is not None
    assert taken.waits
    assert spares.take(sys.executable) is None
    taken.end()
    assert not taken.waits
    spares.close()
    spares.keep(iter([start(plan)]))
    assert spares.take(sys.executable) is None


def test_forks_need_none(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFTER_SECONDS", 0.0)
    forked = Spares("forkserver")
    forked.keep(iter([start(plan)]))
    assert forked.take(sys.executable) is None


def test_none_without_memory(plan: Plan, spares: Spares, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 2**60)
    spares.keep(iter([start(plan)]))
    assert spares.take(sys.executable) is None
