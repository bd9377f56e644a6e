"""Shows a run in the terminal: its plan, its progress and its summary."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hetexp.core.device import GIB, plain_name
from hetexp.core.plan import Plan
from hetexp.core.summary import LEAST_STEPS, modelled
from hetexp.launch.terminal.lines import first_time, format_number, print_line
from hetexp.logger.jsonl import EARLIER_METRICS

LINE_EVERY_SECONDS = 5.0
"""Seconds between lines of progress if the output is no terminal."""

MEASURING = (
    ("processes start", "hello"),
    ("data and models are built", "handshake"),
    ("each device alone", "calibration"),
    ("all devices together", "calibration/joint"),
)
"""Stages of a measurement, and the beginning of the store keys that ranks set at the end of each."""


class Tail:
    """Reads whole lines as they are appended to a file.

    Args:
        old: bytes at the beginning that are skipped.
    """

    def __init__(self, path: Path, old: int = 0) -> None:
        self.path, self._old = path, old
        self._file: IO[str] | None = None
        self._incomplete = ""

    def lines(self) -> list[str]:
        """Return the complete lines that were added since the last call."""
        if self._file is None:
            if not self.path.exists():
                return []
            self._file = self.path.open(encoding="utf-8", errors="replace")
            self._file.seek(self._old)
        text = self._incomplete + self._file.read()
        *complete, self._incomplete = text.split("\n")
        return complete

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class _Bar(Progress):
    """A progress bar with one line below it."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below, style="dim")


class Display:
    """Follows rank 0's log and the metrics of a run, and draws a progress bar in a terminal.

    Args:
        again: whether the run has been followed before, so that its old lines are not shown again.
    """

    def __init__(self, plan: Plan, console: Console, again: bool = False) -> None:
        self.plan, self.console = plan, console
        log, metrics = (Path(plan.run_dir) / name for name in ("logs/rank_0.log", "metrics.jsonl"))
        self._log = Tail(log, _size(log) if again else 0)
        self._metrics = Tail(metrics, _size(metrics) if again else 0)
        self._bar = _Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, detail="")
        self._last_line = 0.0
        self._began, self._measured = time.monotonic(), -1

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        self._bar.stop()
        self._log.close()
        self._metrics.close()

    def follow(self, plan: Plan, log_path: Path) -> None:
        """Follow another plan and the log of another first rank."""
        self.plan = plan
        if log_path != self._log.path:
            self.update()
            self._log.close()
            self._log = Tail(log_path)

    def update(self) -> None:
        """Show the lines since the last call."""
        for line in self._log.lines():
            self.console.print(line, markup=False, highlight=False)
        for text in self._metrics.lines():
            row = modelled(json.loads(text))
            if "train/loss" in row:
                self._show_step(row)
            elif "eval/loss" in row:
                self._show_evaluation(row)

    def total_steps(self, total: int) -> None:
        """Set the number of steps; 0 if only the user's script knows it."""
        self._bar.update(self._task, total=total or None, description="training")

    def measuring(self, done: int) -> None:
        """Show how far a measurement is, and for how long it runs.

        Args:
            done: stages of `MEASURING` that all ranks have ended.
        """
        names = ", ".join(plain_name(device.name) for device in self.plan.devices)
        number, seconds = min(done + 1, len(MEASURING)), time.monotonic() - self._began
        text = f"{MEASURING[number - 1][0]} ({number} of {len(MEASURING)}), {seconds:.0f} s …"
        self._bar.update(
            self._task, description=f"Measuring {names}", completed=done, total=len(MEASURING), detail=text
        )
        if not self.console.is_terminal and self._measured < done < len(MEASURING):
            print_line(self.console, f"Measuring {names}: {text}")
        self._measured = done

    def _show_step(self, row: dict[str, Any]) -> None:
        loss = row["train/loss"]
        text = f"loss {loss:.4f}" if loss is not None else "loss –"
        if row.get("samples_per_second") is not None:  # not after a group re-formed at the line's own step
            text += f"  {row['samples_per_second']:,.0f} samples/s"
        devices = ""
        for device in self.plan.devices:
            share, speed = (row.get(f"device/{device.id}/{key}") for key in ("share", "samples_per_second"))
            if share is not None:
                devices += f"  {device.id} {share:.0%}" + (f" at {speed:,.0f}/s" if speed is not None else "")
        self._bar.below = devices
        self._bar.update(self._task, completed=row["step"], detail=text)
        now = time.monotonic()
        if not self.console.is_terminal and now - self._last_line >= LINE_EVERY_SECONDS:
            self._last_line = now
            self.console.print(f"step {row['step']}  {text}{devices}", highlight=False, soft_wrap=True)

    def _show_evaluation(self, row: dict[str, Any]) -> None:
        values = "  ".join(
            f"{key.removeprefix('eval/')} {row[key]:.4f}"
            for key in ("eval/loss", "eval/accuracy")
            if key in row
        )
        self.console.print(f"evaluation at step {row['step']}: {values}", highlight=False)


def show_plan(plan: Plan, console: Console) -> None:
    """Print the banner of an emulated run and the plan's table with its reasons."""
    if plan.emulated:
        console.print(Panel(_banner(plan), title=_title(plan), border_style="bold yellow", style="yellow"))
    if plan.headline:
        print_line(console, plan.headline, "bold")
    # As text, not markup: a name has the typed overrides, maybe with brackets.
    table = Table(title=Text(plan.name), title_justify="left", title_style="bold")
    columns = ["rank", "device", "name", "share"]
    columns += ["samples a step"] if plan.script is None else []
    columns += ["precision"] if len(set(plan.precisions)) > 1 else []
    columns += ["memory"] if any(need is not None for need in plan.memory_bytes) else []
    for column in columns:
        table.add_column(column, justify="right" if column in ("rank", "share", "samples a step") else "left")
    for place, device in enumerate(plan.all_devices):
        rank = plan.rank_of(place)
        cells: dict[str, str | Text] = {
            "rank": str(rank),
            "device": device.id,
            "name": Text(device.name),
            "share": f"{plan.share_of(place):.1%}",
            "samples a step": str(plan.batch_size_of(place)),
            "precision": plan.precision_of(place) or "",
            "memory": _memory(plan, rank),
        }
        table.add_row(*(cells[column] for column in columns))
    console.print(table)
    for reason in plan.reasons:
        console.print(f"· {reason}", markup=False, highlight=False)


def _memory(plan: Plan, rank: int) -> str:
    """Return a rank's estimated need of its device's memory."""
    need = plan.memory_bytes[rank] if plan.memory_bytes else None
    has = plan.devices[rank].memory_bytes
    if need is None:
        return "–"
    return f"{need / GIB:.1f}" + (f"/{has / GIB:.0f}" if has is not None else "") + " GiB"


def _title(plan: Plan) -> str:
    return "EMULATED DEVICES" if plan.paced else "DEVICES NOT AS THEY ARE"


def _banner(plan: Plan) -> str:
    """Return which devices are emulated, and which are slowed down or limited."""
    absent = [plain_name(d.name) for d in plan.devices if d.backend == "emulated"]
    altered = [d.name for d in plan.devices if d.emulated and d.backend != "emulated"]
    text = ""
    if absent:
        text += (
            f"{', '.join(absent)}: not in this machine. They are modelled on the CPU, the arithmetic is real "
        )
        text += "and the speed is not. "
    if altered:
        text += f"{', '.join(altered)}: made slower or smaller than they are. "
    if plan.config["fault"]["events"]:
        text += "Faults are injected (fault.events). "
    return text + "No number of this run is hardware's."


def show_summary(summary: dict[str, Any], run_dir: Path, console: Console) -> None:
    """Print the results of a completed run."""
    emulated, scale = summary["emulated"], summary["time_scale"] or 1.0
    if summary["fallback"] is not None:
        print_line(console, "Not {from} but {to}: {reason}".format_map(summary["fallback"]), "yellow")
    exchange = summary["comm"].get("fallback")
    if exchange is not None:
        print_line(console, "Exchanged not by {from} but by {to}: {reason}".format_map(exchange), "yellow")
    table = Table(
        title="Result" + (" (emulated)" if emulated else ""), title_justify="left", title_style="bold"
    )
    table.add_column("device")
    table.add_column("name")
    for column in ("share", "samples/s", "waiting", "peak memory"):
        table.add_column(column, justify="right")
    for device in summary["devices"]:
        memory = device["peak_memory"]
        table.add_row(
            device["id"],
            Text(device["name"]),
            format_number(device["share"], ".1%"),
            format_number(_times(device["samples_per_s"], scale), ",.0f"),
            format_number(_times(device["idle_s"], 1 / scale), ".3g", " s"),
            format_number(memory / 2**20 if memory is not None else None, ",.0f", " MiB"),
        )
    whole = "together" if len(summary["devices"]) > 1 else "in all"
    table.add_section()
    speed = format_number(_times(summary["samples_per_s"], scale), ",.0f")
    table.add_row(whole, "", "100.0%", speed, "", "")
    console.print(table)
    if summary["measured_steps"] is not None and summary["measured_steps"] < LEAST_STEPS:
        text = f"Too short to tell how fast it is: {summary['measured_steps']} steps after the first"
        print_line(console, f"{text} line of progress, and {LEAST_STEPS} are needed.")
    elif summary["efficiency"] is not None:
        _show_efficiency(summary, console)
    if summary["loading"]["workers"] is not None:
        _show_loading(summary, console)
    final = summary["final"]
    parts = [f"{summary['steps']} steps, {summary['samples']:,} samples in {summary['wall_s']:.1f} s"]
    parts.append(f"train loss {format_number(final['train_loss'], '.4f')}")
    for name, label in (("loss", "test loss"), ("accuracy", "test accuracy")):
        if final["eval"] and name in final["eval"]:
            parts.append(f"{label} {final['eval'][name]:.4f}")
    console.print(", ".join(parts), highlight=False)
    if summary["merge"] is not None:
        show_merge(summary["merge"], console)
    if emulated:
        how = "devices were altered"
        if summary["time_scale"]:
            how = f"compute, links and memory are modelled, and a modelled second takes {scale:.4g} s"
        console.print(f"Emulated: {how}. Not a measurement of hardware.", style="yellow", highlight=False)
    if summary["valid"] is False:
        text = f"NOT VALID: {summary['invalid_reason']}"
        console.print(text, style="bold red", markup=False, highlight=False)
    print_line(console, f"Everything about this run: {run_dir}")
    earlier = (run_dir / EARLIER_METRICS).exists()
    if any(run_dir.glob("wandb/offline-run-*")) and (first_time("wandb_offline") or earlier):
        more = ", from the first step of the run before" if earlier else ""
        print_line(console, f"W&B has it offline{more}. To send it: hetexp sync {shlex.quote(str(run_dir))}")


def show_merge(merge: dict[str, Any], console: Console) -> None:
    """Print the losses of a merged model and of its independently trained parents."""
    if "error" in merge:
        console.print(f"Not merged: {merge['error']}", style="yellow", markup=False, highlight=False)
        return
    pairs = zip(merge["parents"], merge["weights"], strict=True)
    losses = "; ".join(f"{p['device']} {format_number(p['loss'], '.4f')} ({w:.0%})" for p, w in pairs)
    merged = f"merged ({merge['method']}): test loss {format_number(merge['merged_loss'], '.4f')}"
    console.print(f"{merged}, its parents' {losses}", markup=False, highlight=False)
    if merge.get("batch_norm") == "averaged":
        console.print("BatchNorm: the parents' running statistics were averaged.", highlight=False)
    if merge.get("batch_norm_samples"):
        measured = zip(merge["parents"], merge["batch_norm_samples"], strict=True)
        counts = ", ".join(f"{count} of {parent['device']}" for parent, count in measured if count)
        text = f"BatchNorm: running statistics were measured again on training samples: {counts}."
        console.print(text, markup=False, highlight=False)
    if merge["worse_than_best_parent"]:
        text = "The merged model is worse than its best parent, which is kept, too."
        console.print(text, style="yellow", highlight=False)


def _show_loading(summary: dict[str, Any], console: Console) -> None:
    """Print how long steps waited for samples, and the number of processes that would load them in time."""
    loading, step = summary["loading"], summary["measured_step_s"]
    key = "num_workers" if summary["data"] is None else "trainer.num_workers"  # a script has it in setup
    console.print(
        f"Steps waited for samples {loading['wait_s'] / step:.0%} of their time: one process loads a step's "
        f"samples in {loading['load_s']:.3g} s. Set {key}={loading['workers']} if cores are free.",
        style="yellow",
        highlight=False,
    )


def _show_efficiency(summary: dict[str, Any], console: Console) -> None:
    """Print the run's speed beside the fastest device alone, its efficiency, and what was lost to what."""
    scale, fastest = summary["time_scale"] or 1.0, summary["fastest_alone"]
    if fastest["gain"] is not None:
        names = {device["id"]: device["name"] for device in summary["devices"]}
        name = plain_name(names[fastest["device"]])
        text = f"{fastest['gain']:.2f}× as fast as the {name} alone"
        style = "bold green" if fastest["gain"] >= 1.0 else "bold yellow"
        print_line(console, f"{text} ({fastest['samples_per_s'] * scale:,.0f} samples/s)", style)
    lost = {name: share for name, share in summary["lost_to"].items() if share and abs(share) >= 0.005}
    losses = ", ".join(f"{name} {share:.1%}" for name, share in lost.items())
    alone = f"{summary['solo_samples_per_s'] * scale:,.0f} samples/s"
    if summary["ceiling"] is not None:
        alone += f"; at most {summary['ceiling']:.1%} can be had"
    else:
        alone += " by their own work in this run"
    console.print(
        f"{summary['efficiency']:.1%} of the sum of what the devices do alone ({alone})"
        + (f"; lost to {losses}" if losses else ""),
        highlight=False,
    )
    # The step of a full batch, as predicted; the last batch of an epoch may be smaller.
    predicted, measured = summary["predicted_step_s"], summary["global_batch"] / summary["samples_per_s"]
    if predicted is not None:
        text = f"Full step: predicted {predicted / scale:.4g} s, measured {measured / scale:.4g} s"
        console.print(text, highlight=False)


def _times(value: float | None, factor: float) -> float | None:
    return value * factor if value is not None else None
