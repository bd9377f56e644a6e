"""What the terminal shows while devices are measured."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from support import plan_on, unbuilt_config

from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.terminal.display import MEASURING, Display


def test_a_measurement_shows_each_stage_once_with_its_number_and_seconds(tmp_path: Path) -> None:
    device = CpuBackend.describe(0)
    plan = plan_on([device], unbuilt_config(), run_dir=str(tmp_path))
    screen = io.StringIO()
    with Display(plan, Console(file=screen, width=200)) as display:
        for done in (0, 0, 1, 3, 3, 4):
            display.measuring(done)
    lines = screen.getvalue().splitlines()
    assert len(lines) == 3
    for line, number in zip(lines, (1, 2, 4), strict=True):
        assert line.startswith(f"Measuring {device.name}: ")
        assert f"({number} of {len(MEASURING)}), 0 s" in line
