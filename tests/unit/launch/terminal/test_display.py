"""What the terminal says while devices are measured, and about a run's speed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import plan_on, unbuilt_config

from hetexp.core.device import DeviceSpec
from hetexp.core.summary import LEAST_STEPS, blank_summary, modelled
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.terminal.display import MEASURING, Display, show_plan, show_summary

CARDS = [
    DeviceSpec(f"emulated:{i}", "emulated", i, f"{name} (emulated)", vendor)
    for i, (name, vendor) in enumerate([("RTX 3090", "nvidia"), ("Arc A770", "intel")])
]
CONFIG: dict[str, Any] = {"trainer": {"global_batch_size": 64, "seed": 0}, "fault": {"events": []}}


def summary_of(**changes: Any) -> dict[str, Any]:
    """A summary of two emulated cards at 200 real seconds a modelled one."""
    summary = blank_summary(plan_on(CARDS, CONFIG), "completed")
    for device, speed in zip(summary["devices"], (100.0, 50.0), strict=True):
        device |= {"share": 0.5, "samples_per_s": speed, "idle_s": 2.0, "solo_samples_per_s": speed}
    return summary | {
        "time_scale": 200.0,
        "samples_per_s": 130.0,
        "measured_steps": LEAST_STEPS,
        "solo_samples_per_s": 150.0,
        "efficiency": 130 / 150,
        "fastest_alone": {"device": "emulated:0", "samples_per_s": 100.0, "gain": 1.3},
        "steps": 92,
        "samples": 5748,
        "wall_s": 38.4,
        **changes,
    }


def shown(summary: dict[str, Any], tmp_path: Path) -> str:
    console = Console(file=io.StringIO(), width=160)
    show_summary(summary, tmp_path, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_speeds_of_emulated_cards_are_modelled_and_beside_the_fastest_alone(tmp_path: Path) -> None:
    text = shown(summary_of(), tmp_path)
    assert "1.30× as fast as the RTX 3090 alone (20,000 samples/s)" in text
    for modelled_speed in ("26,000", "20,000", "10,000", "30,000"):
        assert modelled_speed in text
    assert "130 samples/s" not in text


def test_a_short_run_does_not_say_how_fast_it_is(tmp_path: Path) -> None:
    text = shown(summary_of(measured_steps=LEAST_STEPS - 1), tmp_path)
    assert "Too short to tell how fast it is" in text
    assert "as fast as" not in text
    assert "of the sum" not in text


def test_the_plan_begins_with_who_trains() -> None:
    console = Console(file=io.StringIO(), width=160)
    show_plan(plan_on(CARDS, CONFIG, headline="Arc A770 is left out: [so it is]."), console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.index("Arc A770 is left out: [so it is].") < text.index("samples a step")


@pytest.mark.parametrize("scale", [None, 200.0])
def test_speeds_of_a_line_of_metrics_are_modelled(scale: float | None) -> None:
    row = {
        "step": 3,
        "samples_per_second": 2.0,
        "device/cpu:0/samples_per_second": None,
        "device/emulated:0/samples_per_second": 1.5,
        "step_seconds": 0.5,
    }
    factor = scale or 1.0
    assert modelled(row | ({"time_scale": scale} if scale else {})) == row | (
        {
            "emulation/time_scale": scale,
            "samples_per_second": 2.0 * factor,
            "device/emulated:0/samples_per_second": 1.5 * factor,
        }
        if scale
        else {}
    )


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
