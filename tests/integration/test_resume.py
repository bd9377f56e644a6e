"""What any layout saved, any other goes on with: the steps of one device's whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from resume_matrix import LAYOUTS, LIMIT, Trained, difference, train

CHAIN = ("ddp, 3", "nvidia + amd", "hybrid, 3")
"""Three ranks with an empty share, two vendors, three ranks with stages; the whole table is
`benchmarks/resume_matrix.py`."""


def test_a_run_that_moves_from_layout_to_layout(tmp_path: Path) -> None:
    """Cases 33, 34, 39: epochs of 4 steps, left in their midst and at their end."""
    # A schedule over all steps would be another one for each of these runs, which end sooner.
    layouts = {
        name: replace(one, options=(*one.options, "trainer.schedule=constant", "trainer.checkpoint_every=1"))
        for name, one in LAYOUTS.items()
    }
    whole = train(tmp_path / "whole", layouts["single"], 6)
    at, losses, before = 0, [], None
    for number, (name, steps) in enumerate(zip(CHAIN, (3, 1, 2), strict=True)):
        at += steps
        found = train(tmp_path / f"{number}", layouts[name], at, before)
        assert difference(found, Trained(whole.folder, []), at) <= LIMIT, name
        losses += found.losses
        before = found.folder / "checkpoints"
    assert len(losses) == 6
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, whole.losses, strict=True))
    assert worst <= LIMIT
