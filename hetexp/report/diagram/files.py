"""Diagrams of plans: `plan.mmd` always, and SVG, PNG and PDF if Graphviz's `dot` is installed.

No process of a run waits for them. If `dot` is absent, fails or hangs, only the drawings are missing.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetexp.core.files import write_bytes, write_text
from hetexp.core.plan import Plan
from hetexp.report.diagram.dot import dot_of, restyled
from hetexp.report.diagram.mermaid import mermaid_of
from hetexp.report.diagram.picture import Picture, picture_of

FORMATS = ("mmd", "svg", "png", "pdf")
STEM = "plan"
DOT_SECONDS = 20.0
"""Longest wait for one drawing."""
PNG_DPI = 144
NO_DOT = (
    "Graphviz is not installed, so that the plan is not drawn as SVG, PNG or PDF: apt install graphviz, "
    "brew install graphviz, or conda install graphviz."
)


@dataclass(frozen=True)
class Drawn:
    """The written files, and why a file is missing."""

    paths: tuple[Path, ...]
    problem: str | None = None


class DotError(Exception):
    """`dot` failed; the message has the reason."""


def has_dot() -> bool:
    """Return whether Graphviz's `dot` is installed."""
    return shutil.which("dot") is not None


def write_diagrams(
    plan: Plan, folder: Path, formats: Sequence[str] = FORMATS, remarks: Sequence[str] = ()
) -> Drawn:
    """Write a plan's diagrams into a folder, without those for which `dot` is absent or fails.

    Args:
        formats: some of `FORMATS`.
        remarks: further sentences of the drawing.

    Raises:
        OSError: the folder cannot be written.
    """
    picture = picture_of(plan, remarks)
    paths: list[Path] = []
    problems: list[str] = []
    for kind in (name for name in FORMATS if name in formats):
        path = folder / f"{STEM}.{kind}"
        try:
            _write(picture, kind, path)
        except DotError as error:
            problems.append(str(error))
        else:
            paths.append(path)
    return Drawn(tuple(paths), problems[0] if problems else None)


def svg_of(plan: Plan, prefix: str = STEM) -> str | None:
    """Return a drawing for an HTML page, `None` if `dot` is absent or fails.

    It has no background and follows the page's light or dark scheme.

    Args:
        prefix: id of the drawing, and prefix of its parts' ids; unique within the page.
    """
    try:
        return restyled(_dot(dot_of(picture_of(plan)), "svg").decode(), prefix, standalone=False)
    except DotError:
        return None


def _write(picture: Picture, kind: str, path: Path) -> None:
    if kind == "mmd":
        write_text(path, mermaid_of(picture))
    elif kind == "svg":
        write_text(path, restyled(_dot(dot_of(picture), kind).decode(), STEM))
    else:
        write_bytes(path, _dot(dot_of(picture), kind))


def _dot(source: str, kind: str) -> bytes:
    """Return the image that `dot` draws from the source.

    Raises:
        DotError: `dot` is absent, failed, or took too long.
    """
    if not has_dot():
        raise DotError(NO_DOT)
    command = ["dot", f"-T{kind}"] + ([f"-Gdpi={PNG_DPI}"] if kind == "png" else [])
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=DOT_SECONDS)
    except subprocess.TimeoutExpired:
        raise DotError(f"plan.{kind} is not drawn: dot took more than {DOT_SECONDS:g} s.") from None
    except OSError as error:
        raise DotError(f"plan.{kind} is not drawn: dot cannot be started ({error.strerror}).") from error
    if done.returncode != 0 or not done.stdout:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[0] if lines else f"it ended with {done.returncode}"
        raise DotError(f"plan.{kind} is not drawn: dot says {why!r}.")
    return done.stdout
