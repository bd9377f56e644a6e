"""`hetexp sync`: upload the offline W&B files of all runs in some folders, each run once.

`wandb sync` of this interpreter's wandb does the work. Its exit code is 0 even if runs failed or the user was
not logged in. So the file `….wandb.synced` counts, which it leaves beside each run that was sent completely;
such a run is never sent again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hetexp.commands.support.command_line import above_zero, command_parser, exit_code

_EPILOG = """\
examples
  hetexp sync                                      all runs of the newest sweep below outputs
  hetexp sync outputs/2026-01-31                   all runs of a day
  hetexp sync outputs --dry-run                    list the runs to sync"""

_WANDB = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import runpy; runpy.run_module('wandb', run_name='__main__', alter_sys=True)"
)
"""`python -m wandb`, but without modules of the current folder, which may be a stranger's run."""
_POLL_SECONDS = 0.2
_REACH_SECONDS = 10.0
"""Longest wait for the server's first answer."""


@dataclass(frozen=True)
class OfflineRun:
    """The offline W&B file of one run."""

    file: Path
    """`…/wandb/offline-run-<time>-<id>/run-<id>.wandb`"""

    @property
    def run_dir(self) -> Path:
        return self.file.parents[2]

    @property
    def synced(self) -> bool:
        """Whether `wandb sync` has sent all of it."""
        return self.file.with_name(f"{self.file.name}.synced").exists()

    @property
    def ended(self) -> bool:
        """Whether the file is complete: each run of hetexp that ended has a summary."""
        return not (self.run_dir / "plan.json").exists() or (self.run_dir / "summary.json").exists()


def main(arguments: Sequence[str]) -> int:
    """Sync, and list the runs that failed; return 1 if any failed, 2 for a wrong command."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _run(options), drives_torch=False)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "sync",
        "Upload the offline W&B runs in folders and below them, each once. If one fails, the others "
        "are synced all the same. Runs that are still going on are left for later.",
        _EPILOG,
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", type=Path, help="of runs or sweeps")
    parser.add_argument("--dry-run", action="store_true", help="list the runs to sync, and send nothing")
    parser.add_argument("--project", metavar="NAME", help="instead of the runs' own project")
    parser.add_argument("--entity", metavar="NAME", help="instead of the runs' own team or user")
    parser.add_argument(
        "--unfinished",
        action="store_true",
        help="also sync runs without a summary, such as killed ones; a run that is still going on is cut off",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=above_zero,
        default=300.0,
        help="give up if nothing is sent for this long (default: %(default)g)",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    folders = options.folders or [newest_sweep(Path("outputs"))]
    runs = offline_runs(folders)
    waiting = [run for run in runs if not run.synced]
    going_on = [run for run in waiting if not run.ended and not options.unfinished]
    to_sync = [run for run in waiting if run not in going_on]
    names = ", ".join(map(str, folders))
    print(f"{names}: {len(runs)} offline W&B runs, {len(runs) - len(waiting)} of them synced before.")
    for run in going_on:
        print(f"left for later  {run.run_dir}: it has no summary, so it goes on or was killed (--unfinished)")
    if options.dry_run:
        for run in to_sync:
            print(f"would sync  {run.run_dir}")
        return 0
    if not to_sync:
        return 0
    server = server_address()
    problem = unreachable(server)
    if problem is not None:
        print(f"Nothing was synced: W&B's server {server} cannot be reached ({problem}).", file=sys.stderr)
        return 1
    output = sync_runs(to_sync, options.project, options.entity, options.timeout)
    failed = [run for run in to_sync if not run.synced]
    if failed:
        _report_failures(failed, output)
    return 1 if failed else 0


def newest_sweep(outputs: Path) -> Path:
    """Return the newest sweep's folder below `outputs`.

    Raises:
        ConfigError: there is none.
    """
    from hetexp.core.errors import ConfigError

    sweeps = sorted(path for path in outputs.glob("sweeps/*/*") if path.is_dir())
    if not sweeps:
        raise ConfigError(
            f"`FOLDER` must be given if there is no sweep in {outputs / 'sweeps'}: a folder with runs."
        )
    return sweeps[-1]


def offline_runs(folders: Sequence[Path]) -> list[OfflineRun]:
    """Return the offline runs in these folders and below them, each once, in the order of their paths.

    Raises:
        ConfigError: a path is no folder.
    """
    from hetexp.core.errors import ConfigError, must_be

    problems = [must_be("FOLDER", "a folder with runs", str(path)) for path in folders if not path.is_dir()]
    if problems:
        raise ConfigError(problems)
    files = {file.resolve() for folder in folders for file in _files_below(folder)}
    return [OfflineRun(file) for file in sorted(files)]


def _files_below(folder: Path) -> Iterator[Path]:
    for path, folders, _ in os.walk(folder):
        # W&B's own `latest-run` is a link, which os.walk does not follow.
        folders[:] = [name for name in folders if name not in ("checkpoints", "files", "logs")]
        if Path(path).name.startswith("offline-run-"):
            yield from Path(path).glob("run-*.wandb")


def server_address() -> str:
    """Return the address of W&B's server: `WANDB_BASE_URL`, or the address given to `wandb login`."""
    try:
        from wandb.sdk import wandb_setup

        return str(wandb_setup.singleton().settings.base_url)
    except (ImportError, AttributeError):  # wandb has no public way to ask
        return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


def unreachable(server: str, limit: float = _REACH_SECONDS) -> str | None:
    """Return why a server does not answer, `None` if it does: `wandb sync` would retry for hours."""
    import ssl
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(server, timeout=limit).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, ssl.SSLError) else str(reason)
    return None


def sync_runs(runs: Sequence[OfflineRun], project: str | None, entity: str | None, limit: float) -> str:
    """Sync all runs by one command, then each remaining run by its own command; return their output.

    One command for all saves seconds a run, but an error such as a crash of its service ends it for all. No
    run is tried again if the command hung or the user is not logged in.
    """
    command = sync_command([run.file.parent for run in runs], project, entity)
    output, stuck = run_command(command, runs, limit)
    left = [run for run in runs if not run.synced]
    if len(runs) == 1 or stuck or _logged_out(output):
        return output
    outputs = [] if left else [output]
    for run in left:
        output, stuck = run_command(sync_command([run.file.parent], project, entity), [run], limit)
        outputs.append(output)
        if stuck or _logged_out(output):
            break
    return "".join(outputs)


def sync_command(folders: Sequence[Path], project: str | None = None, entity: str | None = None) -> list[str]:
    """Return the command that syncs these folders of W&B's runs."""
    named = {"--project": project, "--entity": entity}
    options = [word for name, value in named.items() if value is not None for word in (name, value)]
    return [sys.executable, "-c", _WANDB, "sync", *options, *map(str, folders)]


def run_command(command: Sequence[str], runs: Sequence[OfflineRun], limit: float) -> tuple[str, bool]:
    """Run the command until it ends, or until nothing has moved for `limit` seconds.

    Each run is reported as soon as it is synced.

    Returns:
        The command's output, and whether it was ended because nothing moved.
    """
    waiting = list(runs)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,  # wandb must not ask for a key
            stdout=output,
            stderr=subprocess.STDOUT,
            # a mode that was meant for runs would keep `wandb sync` offline
            env={name: value for name, value in os.environ.items() if name != "WANDB_MODE"},
        )
        try:
            before, moved_at = None, time.monotonic()
            while process.poll() is None:
                waiting = _report_synced(waiting)
                now = _state(output, runs)
                if now != before:
                    before, moved_at = now, time.monotonic()
                if time.monotonic() - moved_at > limit:
                    break
                _wait(process, _POLL_SECONDS)
        finally:
            stuck = process.poll() is None
            if stuck:
                _end(process)
        _report_synced(waiting)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return text + (f"ended by hetexp: nothing was sent for {limit:g} s (--timeout)\n" if stuck else ""), stuck


def _state(output: IO[bytes], runs: Sequence[OfflineRun]) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Return values that change while runs are sent: the output's size, and times of wandb's files."""
    files = [(path, path.stat()) for run in runs for path in run.file.parent.glob("*.wandb.*")]
    return os.fstat(output.fileno()).st_size, tuple((str(path), stat.st_mtime_ns) for path, stat in files)


def _report_synced(waiting: Sequence[OfflineRun]) -> list[OfflineRun]:
    """Print the runs that are synced by now, and return the others."""
    left = [run for run in waiting if not run.synced]
    for run in waiting:
        if run not in left:
            print(f"synced  {run.run_dir}", flush=True)
    return left


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command; its service ends by itself some seconds later."""
    process.terminate()
    _wait(process, 5.0)
    process.kill()
    process.wait()


def _logged_out(output: str) -> bool:
    """Return whether wandb says that the user is not logged in."""
    return "No API key" in output or "Not authenticated" in output


def _report_failures(failed: Sequence[OfflineRun], output: str) -> None:
    """Print the end of wandb's output, and then the runs that are not synced."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines[-20:]:
        print(f"  {line}", file=sys.stderr)
    if _logged_out(output):
        print("You are not logged in to W&B: run `wandb login`, or set WANDB_API_KEY.", file=sys.stderr)
    print(f"Not synced ({len(failed)}); hetexp sync tries again:", file=sys.stderr)
    for run in failed:
        print(f"  {run.run_dir}", file=sys.stderr)
