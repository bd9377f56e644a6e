"""One rank of a group that trains with many splits in a row, so that few starts are paid for many of them.

    python -m balance_bench.session JOB.json      (started by `runs.start_ranks`)

It builds what a rank of hetexp trains with from the plan of a run, and times `calibrate.joint_steps`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hetexp.core.config import read_config
from hetexp.core.plan import Plan
from hetexp.core.split import Split
from hetexp.training.measuring.calibrate import joint_steps
from hetexp.training.measuring.warmup_calibration import calibrate_time_scale
from hetexp.training.wiring import build_state


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    plan = Plan.read(Path(job["plan"]))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0)
    parts = build_state(plan, read_config(plan.config), rank, store)
    scale = calibrate_time_scale(parts)
    assert scale is not None
    parts.model.train()
    seconds = []
    for counts in job["splits"]:
        own = torch.tensor(joint_steps(parts, Split(tuple(counts)), job["warm_steps"], job["steps"]).seconds)
        seconds.append(float(parts.communicator.all_reduce(own, "max")) / scale)
    late = [parts.backend.invalid_reason() is not None]
    late.append(parts.hook.late_share() > 0.02)
    lost = float(parts.communicator.all_reduce(torch.tensor(float(any(late)))))
    if rank == 0:
        print(json.dumps({"seconds": seconds, "valid": not lost}), flush=True)
    os._exit(0)  # as hetexp's ranks end: taking gloo's threads down can wait for ever


if __name__ == "__main__":
    main()
