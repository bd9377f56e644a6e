"""Runs a rank in a process that another engine has started, through `train.py` or `train_function`."""

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
from hetexp.core.compose.plain import plain
from hetexp.core.compose.words import where_to_look
from hetexp.core.config import check_config
from hetexp.core.errors import HetexpError, RunFailedError, UsageError
from hetexp.core.rank_env import RankEnv, find_rank_env
from hetexp.core.sweep.grid import asks_to_sweep
from hetexp.hardware.selection.devices import select_devices
from hetexp.hardware.selection.pool import Selection
from hetexp.hosts.engine_follower import follow_rank_0
from hetexp.hosts.engine_ranks import EngineRanks
from hetexp.hosts.engine_store import EngineStore
from hetexp.plan.run_spec import Request
from hetexp.worker import end, keep_from_ending, terminated_on_request

START_SECONDS = 120.0
"""`launch.timeout_seconds` if the configuration cannot be read."""


def run_rank(rank_env: RankEnv, arguments: argparse.Namespace) -> NoReturn:
    """Run one rank of the job that the command line describes, and end this process with it."""
    where = where_to_look(arguments)
    if arguments.multirun or asks_to_sweep(arguments.overrides, **where):
        if rank_env.leads:
            print(
                f"A sweep must be started without {rank_env.engine}: its ranks are one job's. Run `python "
                "train.py -m …`, whose jobs have ranks of their own.",
                file=sys.stderr,
            )
        end(2)
    composed, _ = compose_typed(tuple(arguments.overrides), **where)
    try:
        store = EngineStore(rank_env, _timeout_seconds(composed))
    except HetexpError as error:
        print(error, file=sys.stderr)
        end(1)
    terminated_on_request()
    if not rank_env.leads:
        end(_code_of(lambda: follow_rank_0(store, _selected(composed))))
    ranks = EngineRanks(store)
    code = _code_of(lambda: app.start(arguments, ranks))
    keep_from_ending()
    try:
        ranks.end("its output says why" if code else None)
    except RuntimeError:  # the engine's store is gone
        code = code or 1
    end(code)


def train_function(overrides: Sequence[str], run_dir: str | Path | None = None) -> dict[str, Any] | None:
    """Run one rank, and return, for a process that goes on afterwards, such as a worker of Ray Train.

    Args:
        overrides: as after `python train.py`.
        run_dir: folder of the run, the same on the hosts of all ranks; `None`: a new one below `outputs`.

    Returns:
        The run's summary on rank 0, `None` on the others.

    Raises:
        UsageError: no engine has set its variables.
        ConfigError, SetupError, RunFailedError: as a run of the launcher; all ranks end.
    """
    rank_env = find_rank_env()
    if rank_env is None:
        raise UsageError(
            "train_function must be called in a rank of torchrun, SLURM or Ray Train (RANK is not set)."
        )
    app.register_resolvers()
    overrides = list(overrides)
    compose_typed(overrides)  # which gives arguments of a class the sign of a new key
    cfg = app.compose_config(overrides)
    store = EngineStore(rank_env, _timeout_seconds(cfg))
    terminated_on_request()
    if not rank_env.leads:
        follow_rank_0(store, _selected(cfg))
        return None
    now = datetime.now()
    name = f"{now:%H-%M-%S}-{os.urandom(3).hex()}"
    folder = Path(run_dir) if run_dir is not None else Path("outputs") / f"{now:%Y-%m-%d}" / name
    ranks, problem = EngineRanks(store), "its error says why"
    try:
        request = Request(folder.absolute(), Path.cwd(), overrides=tuple(overrides))
        summary = app.run(cfg, request, ranks=ranks)
        problem = ""
        return summary
    finally:
        ranks.end(problem or None)


def _timeout_seconds(composed: DictConfig | None) -> float:
    try:
        return float(composed.launch.timeout_seconds) if composed is not None else START_SECONDS
    except (TypeError, ValueError):  # rank 0 reports it
        return START_SECONDS


def _selected(composed: DictConfig | None) -> Selection:
    """Return the devices of this host; rank 0 reports why a configuration cannot be read."""
    config = check_config(plain(composed)[0])[0] if composed is not None else None
    if config is None:
        return Selection(problems=["`hardware` cannot be read on every host."])
    return select_devices(config.hardware, app.detect_for(config.hardware, Path.cwd()))


def _code_of(job: Callable[[], object]) -> int:
    """Return the exit code of a job; its error is printed."""
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
