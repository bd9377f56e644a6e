"""How much of the exchange of gradients a step has to wait for, and what coded gradients cost in loss.

    python benchmarks/bench_exposed.py --part mix    (one CUDA rank and one CPU rank)
    python benchmarks/bench_exposed.py --part pair --cards 0,1    (two CUDA ranks; --cards 0,0: on one card)
    python benchmarks/bench_exposed.py --part wires --cards 0,1   (float32, bfloat16, int8 on real text)
    python benchmarks/bench_exposed.py --part mix,pair,wires --device cpu --tiny

`mix` and `pair` run each of --backends and the same ranks with the exchange left out (debug.exchange=false),
in turn: *beyond* is a step's time beyond one without exchange, *exposed* is `comm.exposed_s` of the summary.
Losses are compared step by step, so the model's kernels are deterministic ones. `wires` trains longer, and
compares the loss of the evaluation at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

from bench_ddp import report
from benchlib.options import fill, names_of, numbers, parser_of
from ddp_bench.runs import ours
from ddp_bench.task import GPT_124M, TINY, Size
from exposed_bench import runs as exposed
from exposed_bench.runs import WIRES, WITHOUT, Ranks

from hetexp.data.text import Text

PARTS = ("mix", "pair", "wires")


def main(given: list[str] | None = None) -> None:
    arguments = arguments_of(given)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may add up in another order
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench_exposed_") as temporary:
        for part in arguments.part:
            bench = wires if part == "wires" else timed
            results[part] = bench(part, arguments, Path(temporary))
            table = exposed.wires_table if part == "wires" else exposed.timed_table
            print(f"\n{part}: {table(results[part])}\n", flush=True)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def timed(part: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time the steps of each backend and of none, in turn."""
    ranks, size = ranks_of(part, arguments), size_of(part, arguments)
    precision = arguments.precision or ("float32" if "cpu" in ranks.devices else "bfloat16")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (WITHOUT, *arguments.backends)}
    words: list[str] = []
    steps = arguments.warm_steps + arguments.steps
    for number in range(arguments.rounds):
        for name in runs:
            began = time.perf_counter()
            words = exposed.timed(ranks, size, name, steps, precision)
            found = ours(folder, words, arguments.warm_steps, size.sequence_length)
            runs[name].append(found)
            report(f"{part}, round {number + 1}, {name}", found, began)
    facts = {
        "parameters": size.num_parameters(),
        "sequence_length": size.sequence_length,
        "split": ranks.split,
        "precision": precision,
        "warm_steps": arguments.warm_steps,
        "steps": arguments.steps,
        "words": words,
    }
    return {"facts": facts, "runs": runs, "exposed": exposed.exposed(runs)}


def wires(part: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with each wire for the same steps, and compare what the evaluation says."""
    ranks, size = ranks_of(part, arguments), size_of(part, arguments)
    precision = arguments.precision or ("float32" if "cpu" in ranks.devices else "bfloat16")
    backend, steps = arguments.backends[-1], arguments.wire_steps
    runs: dict[str, dict[str, Any]] = {}
    words: list[str] = []
    for wire in arguments.wires:
        began = time.perf_counter()
        words = exposed.trained(ranks, size, backend, wire, steps, precision)
        runs[wire] = ours(folder, words, max(1, steps // 10), size.sequence_length)
        report(f"{part}, {wire}", runs[wire], began)
    characters = Text(sequence_length=size.sequence_length).facts["vocab_size"]
    facts = {
        "parameters": replace(size, vocab_size=characters).num_parameters(),
        "sequence_length": size.sequence_length,
        "split": ranks.split,
        "precision": precision,
        "steps": steps,
        "backend": backend,
        "words": words,
    }
    return {"facts": facts, "runs": runs}


def ranks_of(part: str, arguments: argparse.Namespace) -> Ranks:
    """Return the two ranks of a part."""
    if arguments.device == "cpu":
        devices: tuple[str, ...] = ("cpu", "cpu")
    elif part == "mix":
        devices = (f"cuda:{arguments.cards[0]}", "cpu")
    else:
        devices = tuple(f"cuda:{card}" for card in arguments.cards)
    split = tuple(arguments.split) if part == "mix" else (arguments.local_batch,) * 2
    return Ranks(devices, split, "forkserver" if arguments.device == "cpu" else "subprocess")


def size_of(part: str, arguments: argparse.Namespace) -> Size:
    """Return the model of a part: at least 100 million weights, unless it is tiny."""
    size = TINY if arguments.tiny else GPT_124M
    if part == "wires":
        size = exposed.with_characters(size, arguments.wire_layers)
    length = arguments.mix_sequence_length if part == "mix" else arguments.sequence_length
    return replace(size, sequence_length=length)


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    backends = ("gloo", "shm", "native", "auto")
    parser.add_argument("--part", type=names_of(PARTS), required=True, help=", ".join(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: two CPU ranks")
    parser.add_argument("--cards", type=numbers, default=[0, 0], help="of pair and wires; 0,0: one card")
    parser.add_argument("--backends", type=names_of(backends), default=["gloo", "shm"])
    parser.add_argument("--wires", type=names_of(WIRES), default=list(WIRES))
    parser.add_argument("--tiny", action="store_true", help="a model of no use: whether it works, no figures")
    parser.add_argument("--split", type=numbers, default=[7, 1], help="samples of the card and the CPU")
    parser.add_argument("--local-batch", type=int, default=8, help="samples of each rank in pair and wires")
    parser.add_argument("--mix-sequence-length", type=int, help="128, tiny 16")
    parser.add_argument("--sequence-length", type=int, help="of pair and wires; 512, tiny 16")
    parser.add_argument("--steps", type=int, help="that are timed; 16, tiny 3")
    parser.add_argument("--warm-steps", type=int, help="before them; 4, tiny 1")
    parser.add_argument("--wire-steps", type=int, help="of each wire; 200, tiny 10")
    parser.add_argument("--wire-layers", type=int, help="16 (113 million weights), tiny 2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], help="bfloat16, with a CPU float32")
    parser.add_argument("--out", type=Path, help="where results are kept as JSON")
    arguments = parser.parse_args(given)
    usual = {"mix_sequence_length": (128, 16), "sequence_length": (512, 16), "steps": (16, 3)}
    fill(arguments, usual | {"warm_steps": (4, 1), "wire_steps": (200, 10), "wire_layers": (16, 2)})
    if arguments.wires[0] != WIRES[0]:
        parser.error(f"--wires must begin with {WIRES[0]}, which the others are compared with")
    for name in ("cards", "split"):
        if len(getattr(arguments, name)) != 2:
            parser.error(f"--{name} must be two numbers, as 0,1")
    return arguments


if __name__ == "__main__":
    main()
