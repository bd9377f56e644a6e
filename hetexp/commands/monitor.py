"""`hetexp monitor`: sample all devices of this machine without a run."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.commands.support.command_line import add_shared, command_parser, exit_code

if TYPE_CHECKING:
    from hetexp.core.config import MonitorConfig
    from hetexp.monitor.sample import Sample

MISSING = (
    "The monitor's database needs SQLAlchemy, which is not installed; run: pip install 'hetexp[monitor]'."
)
_EPILOG = """\
examples
  hetexp monitor                                        sample each second until Ctrl-C, into the database
  hetexp monitor --json                                 also print each moment as one line of JSON
  hetexp monitor --once --json                          one sample of each device; nothing is stored
  hetexp monitor monitor.url=postgresql://me@db/lab     into another database"""


def main(arguments: Sequence[str]) -> int:
    """Sample until Ctrl-C; return 2 if an argument cannot be used."""
    parser = command_parser(
        "monitor",
        "Sample all devices of this machine into the monitor's database, as each run does while "
        "it goes on; hetexp top shows it. If another process already samples, this one waits until it ends.",
        _EPILOG,
    )
    parser.add_argument("overrides", nargs="*", help="monitor.key=value, as for hetexp train")
    parser.add_argument("--once", action="store_true", help="print one sample of each device; store nothing")
    add_shared(parser, "--json")
    options = parser.parse_intermixed_args(list(arguments))
    return exit_code(lambda: _run(options), drives_torch=False)


def read_config(overrides: Sequence[str]) -> MonitorConfig:
    """Return the section `monitor` of the typed overrides, the user's own configuration folder included.

    Raises:
        ConfigError: a value is wrong, or a word is of another section.
    """
    from omegaconf import OmegaConf

    from hetexp.app import register_resolvers
    from hetexp.core.compose.conf_folders import name_own_conf_dir
    from hetexp.core.compose.overrides import compose_typed
    from hetexp.core.config import MonitorConfig, validated
    from hetexp.core.errors import ConfigError, must_be

    problems = [
        must_be("OVERRIDE", "monitor.key=value", word)
        for word in overrides
        if not word.lstrip("+~").startswith(("monitor.", "monitor="))
    ]
    if problems:
        raise ConfigError(problems)
    register_resolvers()
    name_own_conf_dir(None)
    composed, problems = compose_typed(list(overrides), config_dir=None)
    if composed is None or problems:
        raise ConfigError(problems)
    raw: Any = OmegaConf.to_container(composed["monitor"], resolve=True)
    config, problems = validated(MonitorConfig, raw, "monitor")
    if config is None:
        raise ConfigError(problems)
    return config


def check_installed(config: MonitorConfig) -> None:
    """Check that the database's packages are installed.

    Raises:
        SetupError: they are not; the message has the fix.
    """
    from hetexp.core.errors import SetupError
    from hetexp.monitor.follow import can_follow

    if not can_follow(config):
        raise SetupError(MISSING)


def _run(options: argparse.Namespace) -> int:
    config = read_config(options.overrides)
    if options.once:
        _print(time.time(), sampled_once(config), options.json)
        return 0
    check_installed(config)
    from hetexp.monitor.service import Service, any_sampler

    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ending.set())
    if any_sampler(config.url):
        message = "Another process samples this machine's devices; this one goes on when that one ends."
    else:
        message = "Sampling; Ctrl-C ends it, hetexp top shows it."
    print(message, file=sys.stderr)
    Service(config, seen=partial(_print, as_json=True) if options.json else None).run(ending)
    return 0


def sampled_once(config: MonitorConfig) -> list[Sample]:
    """Return one moment's samples, measured twice because counters only give differences."""
    from hetexp.monitor.runs import RunWatch, leased
    from hetexp.monitor.sampler import Sampler

    runs = [RunWatch(folder) for folder in dict.fromkeys([*leased(), *_stored_runs(config)])]
    for run in runs:
        run.look()
    with Sampler() as sampler:
        sampler.sample(runs)
        threading.Event().wait(min(1.0, config.interval_seconds))
        samples = sampler.sample(runs)
    for run in runs:
        run.close()
    return samples


def _stored_runs(config: MonitorConfig) -> list[Path]:
    """Return the folders of this machine's active runs, as the database knows them, if there is one."""
    from hetexp.monitor.follow import can_follow

    if not can_follow(config):
        return []
    from sqlalchemy.exc import SQLAlchemyError

    from hetexp.core.errors import SetupError
    from hetexp.monitor.sample import host_name
    from hetexp.monitor.store import ACTIVE, Store
    from hetexp.monitor.tables import default_path

    if config.url is None and not default_path().exists():
        return []
    try:
        store = Store(config.url)
        try:
            return [Path(training["run_dir"]) for training in store.trainings(ACTIVE, host_name())]
        finally:
            store.close()
    except (SQLAlchemyError, SetupError):  # the devices are shown without the runs
        return []


def _print(moment: float, samples: Sequence[Sample], as_json: bool) -> None:
    from hetexp.monitor.sample import as_dict

    rows = [as_dict(sample) for sample in samples]
    if as_json:
        print(json.dumps({"time": moment, "devices": rows}), flush=True)
        return
    from rich.console import Console

    from hetexp.monitor.screen import table_of

    console = Console()
    console.print(table_of(rows, console.width))
