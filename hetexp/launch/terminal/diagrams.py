"""Draws the diagrams of a run while its ranks start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from hetexp.core.config import Config
from hetexp.core.plan import Plan
from hetexp.launch.terminal.lines import first_time, print_line
from hetexp.report.diagram.files import FORMATS, NO_DOT, has_dot, write_diagrams


@contextmanager
def diagrams(plan: Plan, config: Config, console: Console) -> Iterator[None]:
    """Draw the plan into its run folder while the ranks start, or before if devices are emulated.

    A failure does not end the run.
    """
    if plan.measuring or not config.diagram:
        yield
        return
    folder, problem = Path(plan.run_dir), _drawn(plan, ("mmd",))
    thread: threading.Thread | None = None
    if problem is not None:
        print_line(console, problem, "dim")
    elif has_dot():
        problems: list[str | None] = []
        images = tuple(form for form in FORMATS if form != "mmd")
        thread = threading.Thread(target=lambda: problems.append(_drawn(plan, images)), name="diagrams")
        thread.start()
        if plan.paced:  # its ranks soon measure this machine, and nothing else may compute then
            thread.join()
    else:
        _report_absent(console)
    try:
        yield
    finally:
        if thread is not None:
            thread.join()
            if problems[0] is not None:
                print_line(console, f"{problems[0]} {folder / 'plan.mmd'} is there.", "dim")


def _drawn(plan: Plan, formats: tuple[str, ...]) -> str | None:
    """Write some diagrams; return the problem, or `None`."""
    try:
        return write_diagrams(plan, Path(plan.run_dir), formats).problem
    except Exception as error:  # a training does not end for a drawing
        return f"The plan is not drawn: {type(error).__name__}: {error}."


def _report_absent(console: Console) -> None:
    if first_time("graphviz"):
        print_line(console, f"{NO_DOT} plan.mmd shows it wherever Mermaid is understood.", "dim")
