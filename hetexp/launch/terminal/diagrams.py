"""A run's own diagrams, drawn beside its start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from hetexp.core.config import Config
from hetexp.core.plan import Plan
from hetexp.report.diagram.files import FORMATS, NO_DOT, has_dot, write_diagrams

_said_absent = False
"""Whether this process has said that Graphviz is absent: a sweep's runs need not all say so."""


@contextmanager
def diagrams(plan: Plan, config: Config, console: Console) -> Iterator[None]:
    """Draw the plan into its run folder while the ranks start, before that where devices are emulated.

    Nothing that goes wrong with it ends the run.
    """
    if plan.measuring or not config.diagram:
        yield
        return
    folder, problem = Path(plan.run_dir), _drawn(plan, ("mmd",))
    thread: threading.Thread | None = None
    if problem is not None:
        _say(problem, console)
    elif has_dot():
        problems: list[str | None] = []
        rest = tuple(one for one in FORMATS if one != "mmd")
        thread = threading.Thread(target=lambda: problems.append(_drawn(plan, rest)), name="diagrams")
        thread.start()
        if plan.paced:  # its ranks soon find out how fast this machine is: nothing else may compute then
            thread.join()
    else:
        _say_absent(console)
    try:
        yield
    finally:
        if thread is not None:
            thread.join()
            if problems[0] is not None:
                _say(f"{problems[0]} {folder / 'plan.mmd'} is there.", console)


def _drawn(plan: Plan, formats: tuple[str, ...]) -> str | None:
    """Write some diagrams and return what went wrong."""
    try:
        return write_diagrams(plan, Path(plan.run_dir), formats).problem
    except Exception as error:  # no drawing is worth a training, whatever is odd about the plan
        return f"The plan is not drawn: {type(error).__name__}: {error}."


def _say_absent(console: Console) -> None:
    global _said_absent
    if not _said_absent:
        _say(f"{NO_DOT} plan.mmd shows it wherever Mermaid is understood.", console)
    _said_absent = True


def _say(text: str, console: Console) -> None:
    console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
