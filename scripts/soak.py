"""One long run with faults of all kinds, and torchft under the same kills beside it.

    python scripts/soak.py --faults 30 --gap 15 --seed 0 [--torchft VENV/bin/python]

Three emulated devices train for about faults × gap seconds, while ranks are killed (SIGKILL, SIGSEGV), frozen
(SIGSTOP), lose their connections, slow down and run out of memory; what is lost is started again. Afterwards
every loss, the last parameters and the evaluation are those of a run without faults. torchft gets the kills
(SIGKILL, SIGSEGV) of the same schedule, on three replicas of the same model at the same pace, each started
again after as long. A pause is the longest time without a finished step around a kill.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
from benchlib import tables
from benchlib.options import parser_of
from benchlib.runs import keep
from chaos_lab.jobs import adopt_orphans, descendants
from chaos_lab.long_run import Account, hurt
from chaos_lab.rival import Settings, rival
from chaos_lab.schedule import KINDS, schedule


def main(given: list[str] | None = None) -> None:
    arguments = arguments_of(given)
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ["HETEXP_HOME"] = str(folder / "home")
    faults = schedule(arguments.seed, arguments.faults, arguments.gap)
    print(f"{len(faults)} faults in {faults[-1].seconds:.0f} s; folders in {folder}", flush=True)
    accounts = []
    if "hetexp" in arguments.only:
        ours, done = hurt(folder, faults, arguments.step_seconds, arguments.start_method)
        accounts.append(ours)
        for fault, _, whom in done:
            print(f"{fault.seconds:6.1f} s {fault.kind}: {whom}", flush=True)
        if left := descendants(os.getpid()):
            ours.problems.append(f"processes left behind: {left}")
    if arguments.torchft is not None:
        settings = Settings(arguments.heartbeat_timeout, arguments.join_timeout)
        pace = accounts[0].step_seconds if accounts else arguments.step_seconds
        accounts.append(rival(folder, arguments.torchft, faults, pace, settings))
    text = f"{table(accounts)}\n\n{conclusion(accounts, arguments)}"
    tables.publish({"soak": text}, arguments.write)
    for one in accounts:
        print(f"{one.name}, pause after each kill: {', '.join(f'{p:.2f}' for p in one.pauses.values())} s")
        for problem in one.problems:
            print(f"WRONG: {one.name}: {problem}")
    keep(arguments.json, [asdict(account) for account in accounts])
    if any(one.problems for one in accounts):
        sys.exit(f"something went wrong; see {folder}")


def conclusion(accounts: list[Account], arguments: argparse.Namespace) -> str:
    """Say what was compared, and whether all was as it must be."""
    wrong = [problem for one in accounts for problem in one.problems]
    return (
        f"{date.today()}, seed {arguments.seed}, {arguments.faults} faults, mean gap {arguments.gap:g} s, "
        f"{os.cpu_count()} cores, torch {torch.__version__}. "
        + ("; ".join(wrong) if wrong else "Losses, parameters and evaluation are the undisturbed run's.")
    )


def table(accounts: list[Account]) -> str:
    """Return a Markdown table, one line a system."""
    rows = []
    for one in accounts:
        pauses = list(one.pauses.values())
        spread = [f"{statistics.median(pauses):.2f}", f"{max(pauses):.2f}"] if pauses else ["–", "–"]
        cells = [one.name, str(one.steps), f"{one.wall_seconds:.0f}", f"{one.step_seconds:.3f}"]
        rows.append([*cells, f"{one.effective:.1%}", str(len(pauses)), *spread])
    head = ["", "steps", "time s", "median step s", "effective training time", "kills"]
    return tables.table([*head, "pause s: median", "longest"], rows)


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--faults", type=int, default=5 * len(KINDS))
    parser.add_argument("--gap", type=float, default=15.0, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-seconds", type=float, default=0.1, help="what a step is modelled as")
    parser.add_argument("--start-method", default="subprocess", choices=("subprocess", "forkserver"))
    parser.add_argument("--torchft", type=Path, help="an interpreter that has torchft 0.2.0")
    parser.add_argument("--heartbeat-timeout", type=int, default=Settings.heartbeat_timeout, help="ms")
    parser.add_argument("--join-timeout", type=int, default=Settings.join_timeout, help="torchft's, ms")
    parser.add_argument("--only", nargs="+", default=["hetexp", "torchft"], choices=("hetexp", "torchft"))
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    parser.add_argument("--json", type=Path, help="file for the accounts")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
