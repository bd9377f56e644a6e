"""`train.py` and a worker function of a person's own, in processes that another engine has started."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig

from hetexp import app
from hetexp.core.compose.overrides import compose_typed
from hetexp.core.errors import HetexpError, RunFailedError, UsageError
from hetexp.core.rank_env import RankEnv, find_rank_env
from hetexp.core.sweep.grid import asks_to_sweep
from hetexp.engine.follow import follow
from hetexp.engine.lead import Lead
from hetexp.engine.meeting import Meeting
from hetexp.plan.run_spec import Request
from hetexp.worker import end, keep_from_ending, terminated_on_request

START_SECONDS = 120.0
"""`launch.timeout_seconds` where the configuration cannot be read."""


def main(seat: RankEnv, arguments: argparse.Namespace) -> NoReturn:
    """Be one rank of the job that the command line describes, and end this process with it."""
    where = {
        "config_dir": arguments.config_dir,
        "config_path": arguments.config_path,
        "config_name": arguments.config_name or app.CONFIG_NAME,
    }
    if arguments.multirun or asks_to_sweep(arguments.overrides, **where):
        if seat.leads:
            print(
                f"A sweep must be started without {seat.engine}: its ranks are one job's. Run `python "
                "train.py -m …`, whose jobs have ranks of their own.",
                file=sys.stderr,
            )
        end(2)
    composed, _ = compose_typed(arguments.overrides, **where)
    try:
        meeting = Meeting(seat, _limit(composed))
    except HetexpError as error:
        print(error, file=sys.stderr)
        end(1)
    terminated_on_request()
    if not seat.leads:
        end(_code_of(lambda: follow(meeting, composed)))
    lead = Lead(meeting)
    code = _code_of(lambda: app.start(arguments, lead))
    keep_from_ending()
    try:
        lead.end("its output says why" if code else None)
    except RuntimeError:  # the engine's store is gone
        code = code or 1
    end(code)


def train_function(overrides: Sequence[str], run_dir: str | Path | None = None) -> dict[str, Any] | None:
    """Be one rank, and return: for a worker that goes on afterwards, as one of Ray Train's does.

    Args:
        overrides: as after `python train.py`.
        run_dir: folder of the run, the same on all ranks' hosts; `None`: a new one below `outputs`.

    Returns:
        The run's summary on rank 0, `None` on the others.

    Raises:
        UsageError: no engine has set its variables.
        ConfigError, SetupError, RunFailedError: as a run of the launcher; all ranks end.
    """
    seat = find_rank_env()
    if seat is None:
        raise UsageError(
            "train_function must be called in a rank of torchrun, SLURM or Ray Train (RANK is not set)."
        )
    app.register_resolvers()
    cfg = app.compose_config(overrides)
    meeting = Meeting(seat, _limit(cfg))
    terminated_on_request()
    if not seat.leads:
        follow(meeting, cfg)
        return None
    now = datetime.now()
    named = f"{now:%H-%M-%S}-{os.urandom(3).hex()}"
    folder = Path(run_dir) if run_dir is not None else Path("outputs") / f"{now:%Y-%m-%d}" / named
    lead, problem = Lead(meeting), "its error says why"
    try:
        request = Request(folder.absolute(), Path.cwd(), overrides=tuple(overrides))
        summary = app.run(cfg, request, ranks=lead)
        problem = ""
        return summary
    finally:
        lead.end(problem or None)


def _limit(composed: DictConfig | None) -> float:
    try:
        return float(composed.launch.timeout_seconds) if composed is not None else START_SECONDS
    except (TypeError, ValueError):  # rank 0 tells of it
        return START_SECONDS


def _code_of(job: Callable[[], object]) -> int:
    """Return the exit code of what this process was started for; what went wrong is printed."""
    try:
        job()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except RunFailedError as error:
        return error.exit_code
    except HetexpError as error:
        print(error, file=sys.stderr)
        return 1
    except Exception:
        print(traceback.format_exc(), file=sys.stderr)
        return 1
    return 0
