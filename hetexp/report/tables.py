"""The comparison as CSV: one row a run, a variant, a point of a curve; units are in the columns' names."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

from hetexp.report.comparison import Comparison, points, throughput


def runs_csv(comparison: Comparison) -> str:
    """Return one row a run, failed ones included."""
    runs = [run for one in comparison.variants for run in one.runs] + list(comparison.failed)
    return _csv(
        {"folder": str(run.folder), "status": run.status, "samples_per_second": throughput(run)}
        for run in runs
    )


def variants_csv(comparison: Comparison) -> str:
    """Return one row a variant, the fastest first."""
    return _csv({"variant": one.label, **one.settings} for one in comparison.variants)


def curves_csv(comparison: Comparison) -> str:
    """Return one row a logged step of each completed run."""
    return _csv(
        {"folder": str(run.folder), "step": point.step, "samples": point.samples, "seconds": point.seconds}
        for one in comparison.variants
        for run in one.runs
        for point in points(run)
    )


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows with the columns of all of them, in the order in which they first occur."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
