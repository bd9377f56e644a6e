"""Memory that cuDNN takes for a convolution beside its operands and results, on one CUDA card.

    python benchmarks/bench_convolutions.py [--out rows.json] [--record FILE] [--seconds 120]

Each row is a shape in a precision, and for each of the three passes (forward, gradient of the input, gradient
of the weight) the bytes that were taken: with memory to spare, and where there is next to none, when torch
goes on to the next algorithm of cuDNN's list (`Conv_v8.cpp`, `try_configs`). What is known of cuDNN in
`hetexp/hardware/memory/convolution.py` comes from these rows. `--record` writes those that are modelled, for
`tests/unit/hardware/memory/test_convolution.py`. It needs torch only.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

CHANNELS = (3, 16, 32, 64, 96, 128, 256, 512)
SIZES = (4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 224)
BATCHES = (1, 8, 32, 128, 256)
PRECISIONS = ("float32", "float32", "bfloat16", "float16")
SPARE = 16 * 2**20
"""Bytes left over for the algorithm that takes little."""


def shapes(seed: int) -> Iterator[dict[str, Any]]:
    """Yield shapes without end, mostly those of common networks."""
    generator = random.Random(seed)
    while True:
        inputs = generator.choice(CHANNELS)
        shape: dict[str, Any] = {
            "batch": generator.choice(BATCHES),
            "inputs": inputs,
            "outputs": inputs if generator.random() < 0.6 else generator.choice(CHANNELS[1:]),
            "size": generator.choice(SIZES),
            "kernel": generator.choice((3, 3, 3, 3, 1, 5, 7)),
            "stride": generator.choice((1, 1, 1, 2)),
            "groups": 1,
            "precision": generator.choice(PRECISIONS),
        }
        if shape["inputs"] == shape["outputs"] > 3 and generator.random() < 0.1:
            shape["groups"] = shape["inputs"]
        values = shape["batch"] * max(shape["inputs"], shape["outputs"]) * shape["size"] ** 2
        if values <= 2**28 and shape["kernel"] <= shape["size"]:
            yield shape


def taken(call: Callable[[], torch.Tensor], spare: int | None) -> int | None:
    """Return the bytes taken beside the result, `None` where the spare ones are too few."""
    torch.cuda.empty_cache()
    if spare is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
    torch.cuda.reset_peak_memory_stats()
    try:
        result = call()
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        del result
    except RuntimeError:  # out of memory, or no algorithm of cuDNN's list had enough
        return None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return peak


def row(shape: dict[str, Any]) -> dict[str, Any]:
    """Measure the passes of one shape."""
    dtype = getattr(torch, shape["precision"])
    made: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    inputs = torch.rand(shape["batch"], shape["inputs"], shape["size"], shape["size"], **made)
    kernel = shape["kernel"]
    weight = torch.rand(shape["outputs"], shape["inputs"] // shape["groups"], kernel, kernel, **made)
    common = ([shape["stride"]] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], shape["groups"])

    def forward() -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten.convolution(inputs, weight, None, *common)
        return result

    gradient = forward()

    def backward(*wanted: bool) -> torch.Tensor:
        backward = torch.ops.aten.convolution_backward
        results = backward(gradient, inputs, weight, None, *common, [*wanted, False])
        result: torch.Tensor = results[0] if wanted[0] else results[1]
        return result

    passes: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
        "forward": (forward, gradient.nbytes),
        "input": (lambda: backward(True, False), inputs.nbytes),
        "weight": (lambda: backward(False, True), weight.nbytes),
    }
    found = {**shape, "bytes": [inputs.nbytes, gradient.nbytes, weight.nbytes]}
    for name, (call, result) in passes.items():
        found[name] = taken(call, None)
        if found[name]:
            found[f"{name} at least"] = taken(call, result + SPARE)
    return found


def record(found: dict[str, Any]) -> str:
    """Return the rows that are modelled, one a line."""
    modelled = {"kernel": 3, "stride": 1, "groups": 1, "precision": "float32"}
    columns = ("batch", "inputs", "outputs", "size", "forward", "input", "weight")
    rows = [[row[name] for name in columns] for row in found["rows"] if modelled.items() <= row.items()]
    known = {name: found[name] for name in ("card", "torch", "cudnn")} | {"columns": columns}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return json.dumps(known)[:-1] + f', "rows": [\n{lines}\n]}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for all rows, as JSON")
    parser.add_argument("--record", type=Path, help="file for what the tests compare with")
    parser.add_argument("--seconds", type=float, default=120, help="how long new shapes are tried")
    arguments = parser.parse_args()
    # As `hetexp.hardware.backends.cuda` sets it: float32 means float32.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    found |= {"cudnn": torch.backends.cudnn.version(), "rows": []}
    seen, end = set(), time.monotonic() + arguments.seconds
    for shape in shapes(0):
        if time.monotonic() > end:
            break
        key = tuple(shape.values())
        if key not in seen:
            seen.add(key)
            found["rows"].append(row(shape))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found))
    if arguments.record is not None:
        arguments.record.write_text(record(found))
    print(f"{len(found['rows'])} rows on {found['card']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
