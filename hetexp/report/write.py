"""The files of a report: page, text, image and CSV tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetexp.core.files import write_text
from hetexp.report.comparison import compare
from hetexp.report.markdown import render as as_markdown
from hetexp.report.page.html import render as as_page
from hetexp.report.page.image import render as as_image
from hetexp.report.results import Comparison
from hetexp.report.runs import read_runs
from hetexp.report.tables import curves_csv, runs_csv, variants_csv

PAGE, TEXT, IMAGE = "report.html", "report.md", "report.svg"
TABLES = {"runs.csv": runs_csv, "variants.csv": variants_csv, "curves.csv": curves_csv}


def write_report(paths: Sequence[Path], folder: Path, title: str) -> Path:
    """Compare the runs in these folders and below them, and write the report's files.

    Args:
        paths: run folders, sweeps, or folders above them.
        folder: folder of the files, created if it is missing.
        title: title of the report.

    Returns:
        The path of `report.html`; `report.md`, `report.svg` and the CSV files lie beside it.

    Raises:
        ConfigError: a path is no folder, or no folder has a run.
        OSError: the files cannot be written.
    """
    return write_files(compare(read_runs(paths), title), folder)


def write_files(comparison: Comparison, folder: Path) -> Path:
    """Write the files of a comparison; return the path of `report.html`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {TEXT: as_markdown(comparison), PAGE: as_page(comparison)}
    image = as_image(comparison)
    if image is not None:
        files[IMAGE] = image
    for name, text in (files | {name: table(comparison) for name, table in TABLES.items()}).items():
        write_text(folder / name, text)
    return folder / PAGE
