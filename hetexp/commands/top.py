"""`hetexp top`: show devices and runs live in the terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hetexp.commands.monitor import check_installed, read_config
from hetexp.commands.support.command_line import command_parser, exit_code

if TYPE_CHECKING:
    from hetexp.core.config import MonitorConfig
    from hetexp.monitor.store import Store
    from hetexp.monitor.top import Top

FIRST_SECONDS = 3.0
"""Longest wait for a first sample if the screen is printed once."""


def main(arguments: Sequence[str]) -> int:
    """Show the screen until `q`; without a terminal print it once."""
    parser = command_parser(
        "top",
        "Show what each device and run does. Keys: a all devices together or each of them, "
        "arrows choose a run, s stop it, q quit. Without a terminal the screen is printed once.",
    )
    parser.add_argument("overrides", nargs="*", help="monitor.key=value, such as monitor.view=per_gpu")
    options = parser.parse_intermixed_args(list(arguments))
    return exit_code(lambda: _run(options.overrides), drives_torch=False)


def _run(overrides: Sequence[str]) -> int:
    config = read_config(overrides)
    check_installed(config)
    from hetexp.monitor.store import Store
    from hetexp.monitor.top import Top

    store = Store(config.url)
    try:
        with _sampling(config):
            top = Top(store, config)
            if sys.stdin.isatty() and sys.stdout.isatty():
                _live(top, config)
            else:
                _once(top, store)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    finally:
        store.close()
    return 0


@contextmanager
def _sampling(config: MonitorConfig) -> Iterator[None]:
    """Sample while the screen is open, unless a run or another screen does."""
    from hetexp.monitor.service import Service

    ending = threading.Event()
    thread = threading.Thread(target=Service(config).run, args=(ending,), name="samples", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(2.0)


def _live(top: Top, config: MonitorConfig) -> None:
    from rich.console import Console
    from rich.live import Live

    from hetexp.monitor.keys import keys
    from hetexp.monitor.screen import rendered

    console = Console()
    with keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while not top.done:
            width, height = console.size
            live.update(rendered(top.look(), width, height), refresh=True)
            deadline = time.monotonic() + config.interval_seconds
            while (left := deadline - time.monotonic()) > 0:
                key = pressed.wait(left)
                if key is not None:
                    top.press(key)
                    break


def _once(top: Top, store: Store) -> None:
    from rich.console import Console

    from hetexp.monitor.sample import host_name
    from hetexp.monitor.screen import rendered

    console = Console()
    pause, deadline = threading.Event(), time.monotonic() + FIRST_SECONDS

    def sampled() -> bool:
        return any(row["host"] == host_name() for row in store.latest(time.time() - FIRST_SECONDS))

    while not sampled() and time.monotonic() < deadline:
        pause.wait(0.1)
    console.print(rendered(top.look(), console.width, 200))
