"""Many small runs that are killed at random moments, and what must hold after each.

    python scripts/chaos.py --kills 300 --seed-start 0 --out chaos.jsonl [--resume] [--write PAGE]
    python scripts/chaos.py --table chaos.jsonl

Each seed is one run of three emulated devices in float64, to which one thing is done: SIGKILL of a rank, of
rank 0, of the launcher, of everything; SIGSTOP for good or for a while; SIGTERM; a changed byte in a
checkpoint; a full disk; the death of a process that takes a lost one's place; a fault inside a rank. The
moment is any, or one within a pass, the exchange, the update, a save or an evaluation. Afterwards: the run
has ended in time, no process, port, shared memory or temporary file is left, every checkpoint is whole, and
all losses, samples, evaluations and parameters are the undisturbed run's. A run that cannot survive is
resumed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchlib.options import numbers, parser_of
from benchlib.runs import lines_of
from benchlib.tables import publish
from chaos_lab.jobs import adopt_orphans
from chaos_lab.orders import KINDS, drawn
from chaos_lab.page import table
from chaos_lab.runs import Lab


def main(given: list[str] | None = None) -> None:
    arguments = arguments_of(given)
    if arguments.table is not None:
        publish({"chaos": table(lines_of(arguments.table))}, arguments.write)
        return
    adopt_orphans()
    done = lines_of(arguments.out) if arguments.resume and arguments.out is not None else []
    seen = {row["seed"] for row in done}
    seeds = arguments.seeds or range(arguments.seed_start, arguments.seed_start + arguments.kills)
    lab = Lab(Path(tempfile.mkdtemp(prefix="chaos-")), not arguments.no_survival)
    limit = time.monotonic() + arguments.seconds
    found = list(done)
    out = arguments.out.open("a" if arguments.resume else "w") if arguments.out is not None else None
    for seed in seeds:
        order = drawn(seed)
        if seed in seen or (arguments.kind and order.kind not in arguments.kind):
            continue
        if time.monotonic() > limit:
            break
        outcome = lab.try_out(order)
        row = asdict(outcome)
        found.append(row)
        if out is not None:
            out.write(json.dumps(row) + "\n")
            out.flush()
        pause = f", pause {outcome.pause_seconds:.2f} s" if outcome.pause_seconds is not None else ""
        print(f"{seed}: {outcome.result or 'WRONG'}: {outcome.done}{pause} ({outcome.wall_seconds:.1f} s)")
        for problem in outcome.problems:
            print(f"    WRONG: {problem}")
        sys.stdout.flush()
    publish({"chaos": table(found)}, arguments.write)
    wrong = [row["seed"] for row in found if row["problems"]]
    if wrong:
        sys.exit(f"seeds {', '.join(map(str, wrong))} went wrong; their folders are in {lab.folder}")
    shutil.rmtree(lab.folder)


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=len(KINDS), help="how many seeds")
    parser.add_argument("--seed-start", type=int, default=0)
    parser.add_argument("--seeds", type=numbers, help="instead: these")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only seeds of this kind")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no new kill after so long")
    parser.add_argument(
        "--no-survival", action="store_true", help="fault.survive=false: every loss ends a run"
    )
    parser.add_argument("--out", type=Path, help="JSON lines, one a kill")
    parser.add_argument("--resume", action="store_true", help="leave out seeds that --out has, and add to it")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    parser.add_argument("--table", type=Path, help="print the table of such a file, and do nothing else")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
