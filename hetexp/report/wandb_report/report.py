"""The comparison as a W&B report, by wandb-workspaces.

Answer, table, failures and notes are text from the run folders. The charts are W&B's own, of the metrics and
summaries that the runs logged; they find a sweep's runs by its group. wandb and wandb-workspaces are imported
inside functions, since only a W&B report needs them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hetexp.core.errors import ConfigError, SetupError, must_be
from hetexp.logger.background import BackgroundCalls
from hetexp.logger.wandb import changed_environment, teardown
from hetexp.report.markdown import cell, table_row
from hetexp.report.results import Comparison, Variant
from hetexp.report.runs import RunRecord
from hetexp.report.wandb_report.panels import panel_grids
from hetexp.report.words import number

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import Report

LOGGER = "WandbLogger"
"""Class of the logger that sends runs to W&B."""
MISSING = (
    "`--wandb` must have wandb-workspaces, which is not installed; run: pip install 'hetexp[wandb-report]'"
)
NOT_LOGGED_IN = (
    "W&B must know who you are, but you are not logged in; run `wandb login`, or set WANDB_API_KEY. "
    "`--dry-run` shows the report without."
)
SAVE_SECONDS = 90.0
"""Longest wait for W&B."""
LONGEST_TITLE = 128
"""Longest title of a report that W&B accepts, in characters."""
_HEAD = (
    *("variant", "runs", "samples/s", "± (95 %)", "efficiency", "vs equal split", "vs fastest alone"),
    *("train loss", "eval loss", "J/sample", ""),
)
_MEANS = (
    *("efficiency", "gain_over_equal", "gain_over_single"),
    *("train_loss", "eval_loss", "joules_per_sample"),
)
"""Fields of the columns from efficiency on."""
_UNCLEAR = re.compile(r"[^\w ./:,@+-]")
"""Characters that wandb-workspaces 0.4.13 changes in its filters, such as quotes, =, < and >."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of W&B reports."""
    group = parser.add_argument_group("report of W&B")
    group.add_argument("--dry-run", action="store_true", help="print its spec as JSON; needs no network")
    group.add_argument("--project", help="by default the project that the runs were logged to")
    group.add_argument("--entity", help="team or user; by default the runs' own, else that of your login")


def main_wandb(comparison: Comparison, options: argparse.Namespace) -> None:
    """Print the report's spec (`--dry-run`), or save it and print its URL.

    Args:
        options: with those of `add_arguments`.

    Raises:
        ConfigError: it is not known which project of W&B the runs are in.
        SetupError: wandb-workspaces is missing, no user is logged in, or W&B does not answer.
    """
    entity, project = destination(comparison, options.entity, options.project)
    if options.dry_run:
        print(json.dumps(spec_of(build(comparison, entity, project)), indent=2, ensure_ascii=False))
        return
    print(save(comparison, entity, project))
    offline = sum(map(_not_sent, _runs(comparison)))
    if offline:
        print(
            f"{offline} of the runs were logged offline: the report shows them once they are sent "
            "(hetexp sync).",
            file=sys.stderr,
        )


def destination(comparison: Comparison, entity: str | None, project: str | None) -> tuple[str | None, str]:
    """Return entity and project of the report: the requested ones, else the runs' own.

    Raises:
        ConfigError: the runs were logged to no project of W&B, or to several.
    """
    loggers = [logger for run in _runs(comparison) for logger in _wandb_loggers(run)]
    projects = dict.fromkeys(str(logger.get("project") or "hetexp") for logger in loggers)
    if project is None and len(projects) != 1:
        listed = ", ".join(projects) or "none: no run has logger=wandb"
        raise ConfigError(must_be("--project", "given if the runs are not all in one W&B project", listed))
    entities = dict.fromkeys(str(logger["entity"]) for logger in loggers if logger.get("entity"))
    if entity is None and len(entities) > 1:
        raise ConfigError(must_be("--entity", "given if the runs have several", ", ".join(entities)))
    return entity or next(iter(entities), None), project or next(iter(projects))


def build(comparison: Comparison, entity: str | None, project: str) -> Report:
    """Return the report, unsaved, without contacting W&B.

    Args:
        entity: team or user; `None`: W&B's default.

    Raises:
        SetupError: wandb-workspaces is missing.
    """
    wr = _library()
    filters = _filters(comparison)
    blocks: list[Any] = []
    if comparison.emulated:
        blocks.append(wr.CalloutBlock(text="Emulated devices: no number here is one of real hardware."))
    blocks += [
        wr.MarkdownBlock(text=comparison.answer),
        wr.H2(text="Variants"),
        wr.MarkdownBlock(text="\n".join([*table(comparison), *_failures(comparison)])),
    ]
    for title, panels in panel_grids(wr, comparison):
        runset = wr.Runset(entity=entity or "", project=project, name="Runs", filters=filters)
        blocks += [wr.H2(text=title), wr.PanelGrid(runsets=[runset], panels=panels)]
    if comparison.notes:
        blocks += [wr.H2(text="Notes"), wr.MarkdownBlock(text="\n".join(f"- {n}" for n in comparison.notes))]
    report: Report = wr.Report(
        entity=entity or "",
        project=project,
        title=comparison.title[:LONGEST_TITLE],
        description=f"Made by hetexp from {len(_runs(comparison))} runs.",
        blocks=blocks,
        width="fluid",
    )
    return report


def save(comparison: Comparison, entity: str | None, project: str, seconds: float = SAVE_SECONDS) -> str:
    """Save the report and return its URL.

    Raises:
        SetupError: wandb-workspaces is missing, no user is logged in, or W&B does not answer in time.
    """
    _library()
    urls: list[str] = []
    problems: list[BaseException] = []

    def call() -> None:
        import wandb

        who = entity or wandb.Api().default_entity
        report = build(comparison, who, project)
        report.save()
        urls.append(report.url)

    # wandb must not ask for a key: the terminal may be unattended.
    with changed_environment({"WANDB_SILENT": "true"}):
        calls = BackgroundCalls("hetexp-wandb-report", problems.append)
        answered = calls.submit(call).wait(seconds)
        # A call that hangs blocks its thread, so the teardown needs another one.
        last = calls if answered else BackgroundCalls("hetexp-wandb-teardown", lambda error: None)
        last.submit(teardown)
        last.close(timeout_seconds=5.0)
    if not answered:
        raise SetupError(f"W&B must answer within {seconds:g} s, but does not. Is there a network?")
    if problems:
        raise SetupError(_sentence(problems[0], entity, project)) from problems[0]
    return urls[0]


def spec_of(value: Any) -> Any:
    """Return a report as plain types, each object with its class under `type`, without empty fields.

    Unlike the report that W&B gets, it has no random ids and needs no login.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        spec: dict[str, Any] = {"type": type(value).__name__}
        for field in dataclasses.fields(value):
            content = getattr(value, field.name)
            if not field.name.startswith("_") and content not in (None, "", [], {}, (None, None)):
                spec[field.name] = spec_of(content)
        return spec
    if isinstance(value, (list, tuple)):
        return [spec_of(item) for item in value]
    if isinstance(value, dict):
        return {str(key): spec_of(item) for key, item in value.items()}
    return value


def table(comparison: Comparison) -> list[str]:
    """Return the variants as lines of a Markdown table, the best in bold."""
    lines = [table_row(_HEAD), table_row(["---", *["---:"] * (len(_HEAD) - 2), "---"])]
    for variant in comparison.variants:
        speed, label = variant.samples_per_second, cell(variant.label)
        means = [getattr(variant, field) for field in _MEANS]
        cells = [
            f"**{label}**" if variant is comparison.best else label,
            str(len(variant.runs)),
            number(speed.mean if speed is not None else None, 4),
            number(speed.high - speed.mean if speed is not None and speed.high is not None else None, 2),
            *(number(value.mean if value is not None else None, 3) for value in means),
            cell(_remarks(variant)),
        ]
        lines.append(table_row(cells))
    return lines


def _remarks(variant: Variant) -> str:
    """Return marks of a variant whose figures need care; the notes explain them."""
    remarks = ["emulated"] if variant.emulated else []
    remarks += ["not valid"] if not variant.valid else []
    remarks += [f"fell back: {variant.fallback}"] if variant.fallback else []
    return ", ".join(remarks)


def _failures(comparison: Comparison) -> list[str]:
    """Return the runs that did not complete, with their reasons, as lines of Markdown."""
    if not comparison.failed:
        return []
    lines = ["", f"{len(comparison.failed)} did not complete:", ""]
    for run in comparison.failed:
        reason = str(run.summary.get("error") or "").strip().partition("\n")[0]
        name = ", ".join(run.overrides) or run.folder.name
        lines.append(f"- `{name}`: {run.status}{f': {reason}' if reason else ''}")
    return lines


def _runs(comparison: Comparison) -> list[RunRecord]:
    return [*comparison.runs, *comparison.failed]


def _filters(comparison: Comparison) -> Any:
    """Return the filter for the completed runs: their sweeps' groups, or their ids if a run has no group."""
    from wandb_workspaces import expr

    plans = [run.plan for run in comparison.runs if run.plan is not None]
    groups = list(dict.fromkeys(plan.group for plan in plans))
    finished = expr.Metric("State") == "finished"
    named = [group for group in groups if group is not None]
    if len(named) == len(groups) == 1 and not _UNCLEAR.search(named[0]):
        return expr.And(expr.Metric("Group") == named[0], finished)
    if len(named) == len(groups) > 0 and not any(map(_UNCLEAR.search, named)):
        return expr.And(expr.Metric("Group").isin(named), finished)
    return expr.And(expr.Metric("ID").isin([plan.run_id for plan in plans]), finished)


def _wandb_loggers(run: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the settings of each W&B logger of a run, also inside a `MultiLogger`."""
    waiting: list[Any] = [run.plan.config.get("logger")] if run.plan is not None else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if str(value.get("_target_", "")).endswith(LOGGER):
                yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _not_sent(run: RunRecord) -> bool:
    """Return whether a run has W&B files that `wandb sync` has not marked as sent."""
    offline = list((run.folder / "wandb").glob("offline-run-*"))
    return bool(offline) and not any(list(folder.glob("*.synced")) for folder in offline)


def _library() -> Any:
    try:
        import wandb_workspaces.reports.v2 as reports
    except ModuleNotFoundError as error:
        raise SetupError(MISSING) from error
    return reports


def _sentence(error: BaseException, entity: str | None, project: str) -> str:
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    if "log in" in text or "logged in" in text or "API key" in text:
        return NOT_LOGGED_IN
    place = f"{entity}/{project}" if entity else project
    return (
        f"W&B must take the report for {place}, but does not: {text} Is there a network, and does the "
        "project exist (its runs must be sent first)? `--dry-run` shows the report without."
    )
