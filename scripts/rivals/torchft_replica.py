"""One replica that trains with torchft, paced as an emulated device, and records the ends of its steps.

    TORCHFT_LIGHTHOUSE=http://localhost:29510 python torchft_replica.py --number 0 --records FOLDER …

A replica group of one process with torchft's `Manager` and `Optimizer`, gloo between replicas. The gradient
is given to `Manager.allreduce` in one piece: torchft's own DistributedDataParallel (0.2.0) ends survivors by
`assert fut._fut` where gloo's all-reduce fails. This needs nothing of hetexp: torchft may have its own torch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchft import Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    arguments = arguments_of()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    inner = torch.optim.AdamW(net.parameters(), lr=0.002)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=arguments.timeout_seconds)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=limit,
        replica_id=f"replica_{arguments.number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="localhost",
        heartbeat_interval=timedelta(milliseconds=arguments.heartbeat_interval_ms),
    )
    optimizer = Optimizer(manager, inner)
    generator = torch.Generator().manual_seed(arguments.number)
    with (arguments.records / f"{os.getpid()}.jsonl").open("ab", buffering=0) as file:
        while manager.current_step() < arguments.steps:
            before = manager.current_step()
            optimizer.zero_grad()  # asks for a quorum
            inputs = torch.randn(4, 4, generator=generator, dtype=torch.float64)
            loss = nn.functional.cross_entropy(net(inputs), inputs[:, :3].argmax(dim=1))
            time.sleep(arguments.step_seconds)
            loss.backward()
            gradients = [p.grad for p in net.parameters() if p.grad is not None]
            flat = parameters_to_vector(gradients)
            manager.allreduce(flat).wait()  # an error is kept for `should_commit`
            vector_to_parameters(flat, gradients)
            optimizer.step()  # where all replicas had no error
            step = manager.current_step()
            if step > before:
                line = {"step": step, "indices": [0], "time": time.monotonic()}
                file.write(json.dumps(line).encode() + b"\n")
    manager.shutdown(wait=False)
    os._exit(0)  # its threads may wait for a peer that has ended


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--number", type=int, required=True, help="of the replica")
    parser.add_argument("--records", type=Path, required=True, help="folder for a file of finished steps")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True, help="how long a step computes")
    parser.add_argument("--timeout-seconds", type=float, default=10.0, help="of torchft's operations")
    parser.add_argument("--heartbeat-interval-ms", type=int, default=100)
    return parser.parse_args()


if __name__ == "__main__":
    main()
