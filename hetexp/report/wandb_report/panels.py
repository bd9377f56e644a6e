"""The panels of a W&B report: W&B's charts of the metrics and of the summary.

Names of metrics are those of `hetexp/training/loop.py`, and of the summary those of `summary.json`. The
panels show only metrics that the runs logged.
"""

from __future__ import annotations

from typing import Any

from hetexp.logger.wandb import STEP_METRIC
from hetexp.report.results import Comparison

LOSS, SAMPLES = "train/loss", "train/samples"
SPEED, EFFICIENCY, FINAL_LOSS, SCALE = "samples_per_s", "efficiency", "final.train_loss", "time_scale"
"""Fields of the summary."""
GLOBAL_BATCH = "trainer.global_batch_size"
WIDTH, HEIGHT = 24, 10
"""Width and height of a row of panels, in units of W&B's grid."""
MOST_RUNS = 100
"""Most runs in a panel; W&B's default is 10."""


def panel_grids(wr: Any, comparison: Comparison) -> list[tuple[str, list[Any]]]:
    """Return the sections of charts, each a title and its panels.

    Args:
        wr: `wandb_workspaces.reports.v2`.
    """
    return _Panels(wr, comparison).grids() if comparison.variants else []


class _Panels:
    def __init__(self, wr: Any, comparison: Comparison) -> None:
        runs = comparison.runs
        self.wr = wr
        self.count = min(len(runs), MOST_RUNS)
        self.marked = ", emulated" if comparison.emulated else ""
        self.paced = all(run.summary.get(SCALE) for run in runs)
        """Whether all runs have a modelled time, and so must be compared in it."""
        self.logged = list(dict.fromkeys(name for run in runs for line in run.metrics for name in line))

    def grids(self) -> list[tuple[str, list[Any]]]:
        columns = self._columns()
        sections = [
            ("Throughput and efficiency", self._bars() + self._scalars()),
            ("Loss", self._row(*self._losses())),
            ("Split", self._row(*self._splits())),
            ("Settings against results", self._row(columns)),
            ("Runs compared", self._row(self.wr.RunComparer(diff_only="split"))),
        ]
        return [(title, panels) for title, panels in sections if panels]

    def _row(self, *panels: Any, top: int = 0, height: int = HEIGHT) -> list[Any]:
        """Lay panels side by side."""
        width = WIDTH // max(len(panels), 1)
        for place, panel in enumerate(panels):
            panel.layout = self.wr.Layout(x=place * width, y=top, w=width, h=height)
        return list(panels)

    @property
    def _speed_expressions(self) -> list[str] | None:
        """Expression of samples a second in modelled time, since each paced run has its own scale."""
        return [f"${{summary:{SPEED}}} * ${{summary:{SCALE}}}"] if self.paced else None

    def _title(self, text: str) -> str:
        return f"{text}{self.marked}"

    def _bars(self) -> list[Any]:
        unit = f"samples / s, {'modelled time' if self.paced else 'wall-clock'}"
        share = "throughput ÷ sum of what the devices do alone"
        shown = {"max_runs_to_show": self.count, "max_bars_to_show": self.count}
        speed = {"title_x": unit, "custom_expressions": self._speed_expressions, **shown}
        efficiency = {"title_x": share, "range_x": (0, None), **shown}
        return self._row(
            self.wr.BarPlot(title=self._title("Samples a second"), metrics=[SPEED], **speed),
            self.wr.BarPlot(title=self._title("Efficiency"), metrics=[EFFICIENCY], **efficiency),
        )

    def _scalars(self) -> list[Any]:
        fastest, best, least = (
            self.wr.ScalarChart(title=self._title(title), metric=metric, groupby_aggfunc=aggregate)
            for title, metric, aggregate in (
                ("Most samples a second", SPEED, "max"),
                ("Best efficiency", EFFICIENCY, "max"),
                ("Least loss", FINAL_LOSS, "min"),
            )
        )
        fastest.custom_expressions = self._speed_expressions
        return self._row(fastest, best, least, top=HEIGHT, height=HEIGHT // 2)

    def _losses(self) -> list[Any]:
        # The run's clock, with evaluations; `report.html` leaves them out.
        time = {"x": "RelativeTime(Process)", "title_x": "seconds of the run"}
        if self.paced:
            time |= {"xaxis_expression": f"${{_runtime}} / ${{summary:{SCALE}}}"}
            time |= {"title_x": "seconds of the run, modelled time"}
        axes = [
            ("Loss over steps", {"x": STEP_METRIC, "title_x": "step"}),
            ("Loss over samples", {"x": SAMPLES, "title_x": "samples"}),
            ("Loss over time", time),
        ]
        return [self._lines(title, [LOSS], "loss", axis) for title, axis in axes]

    def _splits(self) -> list[Any]:
        over = {"x": STEP_METRIC, "title_x": "step"}
        panels = [
            ("Share of the samples, by device", self._of_devices("device/", "/share")),
            ("Weight that the policy gives, by device", self._of_devices("balancing/weight/")),
        ]
        return [self._lines(title, names, "fraction", over) for title, names in panels if names]

    def _lines(self, title: str, metrics: list[str], unit: str, axis: dict[str, str]) -> Any:
        return self.wr.LinePlot(
            title=self._title(title), y=metrics, title_y=unit, max_runs_to_show=self.count, **axis
        )

    def _of_devices(self, start: str, end: str = "") -> list[str]:
        return [name for name in self.logged if name.startswith(start) and name.endswith(end)]

    def _columns(self) -> Any:
        wr = self.wr
        shares = self._of_devices("balancing/weight/") or self._of_devices("device/", "/share")
        metrics = [*map(wr.SummaryMetric, shares), wr.Config(GLOBAL_BATCH)]
        outcomes = (EFFICIENCY, FINAL_LOSS) if self.paced else (SPEED, EFFICIENCY, FINAL_LOSS)
        metrics += map(wr.SummaryMetric, outcomes)  # a paced run's summary has this machine's speed
        return wr.ParallelCoordinatesPlot(
            title=self._title("Weights and global batch against speed and loss"),
            columns=[wr.ParallelCoordinatesPlotColumn(metric=metric) for metric in metrics],
        )
