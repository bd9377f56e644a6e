"""Estimated against measured peak memory of a training step, on one CUDA card.

    python benchmarks/bench_memory.py [--out rows.json] [--only gpt] [--events] [--limits] [--record FILE]

Each row is a model, an optimizer and a precision: three steps as the training loop does them, in fresh
memory. Then the largest microbatch that the estimate says fits into 6 GiB is compared with the largest that
really runs. Without a card it prints the estimates only.

`--out` keeps each row, and with `--events` the size of everything that was allocated and freed in the last
step, in order: the constants of `hetexp/hardware/memory/trace.py` come from these. `--limits` looks for the
least memory that each row really runs in: the constants of `hetexp/hardware/memory/rules.py` come from these.
`--record` writes what `tests/unit/hardware/memory/test_recorded.py` compares with.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

from benchlib.options import parser_of

from hetexp.core.device import DeviceSpec
from hetexp.core.instantiate import instantiate
from hetexp.hardware.memory.estimate import (
    MemoryEstimate,
    Workload,
    estimate_memory,
    largest_microbatch,
)
from hetexp.hardware.memory.rules import MIB, rules_for
from hetexp.training.loss import CrossEntropy, MeanSquaredError

STEPS = 3
CAPACITY = 6 * 2**30
"""Memory into which the largest microbatch is to fit."""
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model with a batch, as plain data."""

    name: str
    model: dict[str, Any]
    """Its class and arguments."""
    inputs: dict[str, Any]
    """The shape of a sample, and for whole numbers what they are below."""
    targets: dict[str, Any]
    size: int

    def build(self) -> nn.Module:
        model: nn.Module = instantiate(self.model)
        return model

    def batch(self, size: int) -> Batch:
        return values(size, **self.inputs), values(size, **self.targets)

    @property
    def loss(self) -> Any:
        return CrossEntropy() if "below" in self.targets else MeanSquaredError()


def values(size: int, shape: list[int], below: int | None = None) -> torch.Tensor:
    return torch.rand(size, *shape) if below is None else torch.randint(below, (size, *shape))


def mlp(name: str, hidden: list[int], shape: list[int], size: int) -> Case:
    model = {"_target_": "hetexp.model.mlp.MLP", "hidden_sizes": hidden, "input_shape": shape}
    return Case(name, {**model, "num_classes": 10}, {"shape": shape}, {"shape": [], "below": 10}, size)


def convnet(name: str, widths: list[int], blocks: int, shape: list[int], size: int) -> Case:
    model = {"_target_": "hetexp.model.convnet.ConvNet", "widths": widths, "blocks_per_width": blocks}
    model |= {"input_shape": shape, "num_classes": 10}
    return Case(name, model, {"shape": shape}, {"shape": [], "below": 10}, size)


def gpt(
    name: str, layers: int, heads: int, width: int, length: int, vocabulary: int, size: int, **more: Any
) -> Case:
    model = {
        "_target_": "hetexp.model.gpt.GPT",
        "num_layers": layers,
        "num_heads": heads,
        "embedding_size": width,
    }
    model |= {"sequence_length": length, "vocab_size": vocabulary, **more}
    tokens = {"shape": [length], "below": vocabulary}
    return Case(name, model, tokens, tokens, size)


def autoencoder(name: str, width: int, hidden: int, size: int) -> Case:
    shape = {"shape": [width]}
    return Case(name, {**mlp(name, [hidden], [width], size).model, "num_classes": width}, shape, shape, size)


CASES = [
    mlp("mlp small", [64, 64], [1, 8, 8], 64),
    mlp("mlp medium", [2048] * 3, [3, 32, 32], 512),
    mlp("mlp large", [8192] * 4, [3, 64, 64], 4096),
    convnet("convnet small", [32, 64], 1, [1, 8, 8], 64),
    convnet("convnet medium", [64, 128, 256], 2, [3, 32, 32], 256),
    convnet("convnet large", [64, 128, 256, 512], 3, [3, 224, 224], 32),
    gpt("gpt small", 4, 4, 128, 128, 65, 32),
    gpt("gpt medium", 6, 6, 384, 256, 65, 64),
    gpt("gpt large", 12, 12, 768, 1024, 50304, 8, tie_weights=True),
    autoencoder("autoencoder", 4096, 65536, 1024),
]
DROPOUT = gpt("gpt dropout", 6, 6, 384, 256, 65, 64, dropout=0.1)
FITTED = ("convnet medium", "convnet large", "gpt medium", "gpt large")
"""Cases whose largest microbatch is tried out."""


@dataclass(frozen=True)
class Row:
    """What is run and compared."""

    case: Case
    optimizer: str
    precision: str
    microbatches: int = 1
    ddp: bool = False
    fused: bool = False

    @property
    def name(self) -> str:
        kind = (" ddp" if self.ddp else "") + (f" x{self.microbatches}" if self.microbatches > 1 else "")
        return self.case.name + kind + (" fused" if self.fused else "")

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.fused or None)
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """`hetexp.training.state.TrainState.local_loss`."""
        loss: torch.Tensor = self.case.loss.total(output.float(), targets)
        return loss


def all_rows() -> list[Row]:
    pairs = [(o, p) for o in ("sgd", "adamw") for p in ("float32", "bfloat16")]
    rows = [Row(case, *pair) for case in CASES for pair in pairs]
    medium = next(case for case in CASES if case.name == "gpt medium")
    rows += [Row(DROPOUT, "adamw", p) for p in ("float32", "bfloat16")]
    rows += [Row(medium, "adamw", "float32", microbatches=2), Row(medium, "adamw", "float32", fused=True)]
    rows += [Row(medium, "adamw", "float32", ddp=True), Row(medium, "adamw", "bfloat16", 2, ddp=True)]
    return rows


def workload(row: Row) -> Workload:
    with torch.device("meta"):
        model = row.case.build()
    accumulates = row.microbatches > 1
    return Workload(
        model=model,
        build_optimizer=row.build_optimizer,
        loss=row.total,
        sample=row.case.batch(2),
        precision=row.precision,
        accumulates=accumulates,
        keeps_gradients=row.ddp,  # as `hetexp.strategy.ddp.DDP` says of gradients that are views into buckets
        bucket_bytes=lambda gradients, more: gradients if row.ddp and more else 0,
    )


def card() -> DeviceSpec:
    """Return the card in hand, without one an H100."""
    architecture = "sm_90"
    if torch.cuda.is_available():
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return DeviceSpec("cuda:0", "cuda", 0, "card", "nvidia", architecture=architecture)


def autocast(row: Row) -> contextlib.AbstractContextManager[Any]:
    if row.precision != "bfloat16":
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16)


def train_step(row: Row, module: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """`hetexp.training.step.joint_step`, as far as memory goes."""
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device="cuda")
    inputs, targets = batch
    for position in range(row.microbatches):
        last = position == row.microbatches - 1
        synchronises = last or not row.ddp
        with contextlib.nullcontext() if synchronises else module.no_sync():  # type: ignore[operator]
            with autocast(row):
                output = module(inputs.to("cuda", non_blocking=True))
                total = row.total(output, targets.to("cuda", non_blocking=True))
            (total * (1.0 / len(inputs))).backward()
        loss_sum += total.detach()
    optimizer.step()


def clean() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measure(row: Row, events: bool, size: int | None = None) -> dict[str, Any]:
    """Run a row's steps and return what torch's statistics said."""
    clean()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = row.case.build()
    module: nn.Module = model
    if row.ddp:
        module = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = row.build_optimizer(model)
    batch = row.case.batch(size or row.case.size)
    trace: list[list[Any]] = []
    for step in range(STEPS):
        if events and step == STEPS - 1:
            torch.cuda.memory._record_memory_history(context=None, max_entries=100_000, clear_history=True)
        train_step(row, module, optimizer, batch)
    if events:
        recorded = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        signs = {"alloc": 1, "free_completed": -1}
        trace = [[signs[e["action"]], e["size"], e["addr"]] for e in recorded if e["action"] in signs]
    return {
        "peak": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved(),
        "events": trace,
    }


def probe() -> dict[str, Any]:
    """Return what the libraries take by themselves: the context, and the workspace of each thread."""
    free, total = torch.cuda.mem_get_info()
    found: dict[str, Any] = {"total": total, "used before the first tensor": total - free}
    weight = torch.rand(8, 8, device="cuda", requires_grad=True)
    start = torch.cuda.memory_allocated()
    out = torch.rand(8, 8, device="cuda") @ weight
    found["workspace forward"] = torch.cuda.memory_allocated() - start
    out.sum().backward()
    found["workspace forward and backward"] = torch.cuda.memory_allocated() - start
    return found


def context_bytes() -> int:
    """Return what this process holds of the card beside torch's allocator, if no other process is on it."""
    clean()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@contextlib.contextmanager
def limited(capacity: int) -> Iterator[None]:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(capacity / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether it was for want of memory; torch says otherwise where no convolution had enough."""
    return isinstance(error, torch.OutOfMemoryError) or "unable to find an engine" in str(error)


def runs(row: Row, capacity: int, size: int | None = None) -> bool:
    """Return whether the row's steps run within so many bytes."""
    with limited(capacity):
        try:
            measure(row, False, size)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return False
        return True


def border(low: int, high: int, grain: float, holds: Callable[[int], bool]) -> int:
    """Return the largest number found to hold, between one that does and one that does not."""
    while high - low > max(1.0, grain * abs(low)):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def least(row: Row, peak: int, reserved: int) -> int:
    """Return the least bytes that the steps run in, to 0.5 %."""
    return -border(-int(1.02 * reserved), -(peak // 2), 0.005, lambda capacity: runs(row, -capacity))


def fit(row: Row) -> dict[str, Any]:
    """Compare the largest microbatch that is said to fit with the largest that runs, to 1 %."""
    rules = replace(rules_for(card()), context_bytes=0)  # the limit is on torch's allocator
    said = largest_microbatch(workload(row), CAPACITY, rules, most=4096)
    high = 1
    while runs(row, CAPACITY, high):
        high *= 2
    found = border(high // 2, high, 0.01, lambda size: runs(row, CAPACITY, size))
    clean()
    return {"row": row.name, "precision": row.precision, "capacity": CAPACITY, "said": said, "largest": found}


def record(found: dict[str, Any]) -> str:
    """Return what is kept for the tests, a row a line: how each is built, and what was measured."""
    by_name = {(row.name, row.optimizer, row.precision): row for row in all_rows()}
    rows = []
    for entry in found["rows"]:
        row = by_name[entry["row"], entry["optimizer"], entry["precision"]]
        case, measured = row.case, entry["measured"]
        known: dict[str, Any] = {"row": row.name, "optimizer": row.optimizer, "precision": row.precision}
        known |= {"microbatch_size": case.size, "microbatches": row.microbatches, "ddp": row.ddp}
        known |= {"fused": row.fused, "model": case.model, "inputs": case.inputs, "targets": case.targets}
        rows.append({**known, "peak": measured["peak"], "least": measured.get("least")})
    fits = [{key: one[key] for key in ("row", "precision", "capacity", "largest")} for one in found["fits"]]
    kept = {key: found[key] for key in ("card", "torch", "cudnn", "context")}
    parts = [f'"date": "{time.strftime("%Y-%m-%d")}"']
    parts += [f'"{key}": {json.dumps(value)}' for key, value in kept.items()]
    for name, lines in (("rows", rows), ("fits", fits)):
        parts.append(f'"{name}": [\n' + ",\n".join(f"  {json.dumps(line)}" for line in lines) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def compare(row: Row, events: bool) -> dict[str, Any]:
    started = time.perf_counter()
    estimate: MemoryEstimate = estimate_memory(workload(row), row.case.size, rules_for(card()))
    seconds = time.perf_counter() - started
    known = {name: getattr(estimate, name) for name in estimate.__dataclass_fields__}
    entry: dict[str, Any] = {
        "row": row.name,
        "optimizer": row.optimizer,
        "precision": row.precision,
        "size": row.case.size,
        "seconds": seconds,
        "estimate": {
            **known,
            "allocated": estimate.allocated_bytes,
            "least": estimate.least_bytes,
            "total": estimate.total_bytes,
        },
    }
    if torch.cuda.is_available():
        entry["measured"] = measure(row, events)
        entry["ratio"] = estimate.allocated_bytes / entry["measured"]["peak"]
    return entry


def show(entry: dict[str, Any]) -> None:
    cells = [f"{entry['row']:22}", f"{entry['optimizer']:6}", f"{entry['precision']:9}"]
    cells.append(f"{entry['estimate']['allocated'] / MIB:10.1f}")
    if "measured" in entry:
        cells.append(f"{entry['measured']['peak'] / MIB:10.1f}  {entry['ratio']:6.3f}")
        cells.append("" if abs(entry["ratio"] - 1) <= 0.15 else "off")
    cells.append(f"{entry['seconds']:5.2f} s" + (f"  {r}" if (r := entry["estimate"]["reason"]) else ""))
    print("  ".join(cells), flush=True)


def join_group() -> None:
    """Join a process group of one for the rows under DDP."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)


def find_limits(rows: list[Row], found: dict[str, Any], all_of_them: bool) -> None:
    """Add the largest microbatches, and the least memory of each row.

    After all peaks: where memory was short, torch keeps to the convolutions that took little.
    """
    for row in rows:
        if row == Row(row.case, "adamw", row.precision) and row.case.name in FITTED:
            found["fits"].append(fit(row))
            print(found["fits"][-1], flush=True)
    for row, entry in zip(rows, found["rows"], strict=True) if all_of_them else ():
        measured = entry.get("measured")
        if measured is not None and not row.ddp and measured["peak"] > 200 * MIB:
            measured["least"] = least(row, measured["peak"], measured["reserved"])
            ratio = measured["least"] / entry["estimate"]["least"]
            print(f"{row.name:22}  {row.optimizer:6}  {row.precision:9}  runs in {ratio:.3f} of the estimate")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, help="file for everything that was measured, as JSON")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--events", action="store_true", help="keep each allocation of the last step")
    parser.add_argument("--limits", action="store_true", help="look for the least memory of each row")
    parser.add_argument("--record", type=Path, help="file for what the tests compare with")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__, "rows": [], "fits": []}
    on_card = torch.cuda.is_available()
    if on_card:
        # As `hetexp.hardware.backends.cuda` sets them: float32 means float32.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        found |= {"card": torch.cuda.get_device_name(), "probe": probe()}
        found["cudnn"] = torch.backends.cudnn.version()
        print(found["card"], found["torch"], found["probe"])
    print("row, optimizer, precision, estimated MiB" + (", measured MiB, ratio" if on_card else ""))
    rows = [row for row in all_rows() if arguments.only in row.name]
    for row in rows:
        if on_card and row.ddp and not torch.distributed.is_initialized():
            found["context"] = context_bytes()  # NCCL takes some, too
            join_group()
        try:
            entry = compare(row, arguments.events)
        except Exception as error:  # one row that fails costs no other
            entry = {"row": row.name, "error": f"{type(error).__name__}: {error}"}
            print(entry)
        else:
            show(entry)
        found["rows"].append(entry)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if on_card:
        found.setdefault("context", context_bytes())
        print(f"beside torch's allocator: {found['context'] / MIB:.0f} MiB")
        find_limits(rows, found, arguments.limits)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(found))
        if arguments.record is not None:
            arguments.record.write_text(record(found))
    ratios = [entry["ratio"] for entry in found["rows"] if "ratio" in entry]
    if ratios:
        off = sum(abs(ratio - 1) > 0.15 for ratio in ratios)
        print(
            f"{len(ratios)} rows, ratios from {min(ratios):.3f} to {max(ratios):.3f}, {off} off by over 15 %"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
