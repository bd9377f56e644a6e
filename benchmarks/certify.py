"""Write docs/reference/certificates.md: `hetexp verify` for every strategy that claims exactness.

    python benchmarks/certify.py [--steps 20] [--only pipeline] [--device cuda:0 --device cpu]

Each case is one row: 20 steps as configured and 20 on one device in float64, and the control. It ends with 1
if a case is not exact. A strategy that is not in `conf/strategy` is left out, and the page says so.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

from benchlib.options import parser_of
from benchlib.tables import row as line
from benchlib.tables import table

from hetexp.commands.support.certificate import EXACT, Certificate
from hetexp.commands.verify import verify
from hetexp.core.compose.options import group_options
from hetexp.model.gpt import GPT

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/certificates.md"
SYNTHETIC = ("data=synthetic", "data.num_samples=240", "data.num_test_samples=16")
TOKENS = (*SYNTHETIC, "data.kind=tokens", "data.mask_fraction=0.6")
SIZES = ("model.num_layers=4", "model.num_heads=2", "model.embedding_size=16")
MODELS = {
    "mlp": (*SYNTHETIC, "model=mlp", "model.hidden_sizes=[32,32,32]"),
    "gpt": (*TOKENS, "model=gpt", *SIZES, "model.dropout=0.1"),
    "gpt, tied": (*TOKENS, "model=gpt", *SIZES, "model.tie_weights=true"),
    "gpt, experts": (*TOKENS, "model=gpt", *SIZES, "model.num_experts=2", "model.experts_per_token=1"),
    "convnet, BatchNorm": (
        *SYNTHETIC,
        "data.input_shape=[1,8,8]",
        "model=convnet",
        "model.widths=[8,8]",
        "model.norm=batch",
    ),
    "gpt, frozen parts": (
        *TOKENS,
        "model=custom",
        "model._target_=certify.FrozenGPT",
        *(f"+{size}" for size in SIZES),
    ),
}
COMMON = (
    "trainer.global_batch_size=32",
    "trainer.max_epochs=null",
    "trainer.max_steps=20",
    "hardware.threads_per_rank=1",
    "launch.start_method=forkserver",
)
# The tables of a run are 240 samples long: 7 full batches of 32 and a short one of 16, so that 20 steps have
# two short ones.


class FrozenGPT(GPT):
    """A GPT whose embeddings and first block are not trained, as in fine-tuning."""

    def __init__(self, vocab_size: int | None = None, sequence_length: int | None = None, **arguments: Any):
        super().__init__(vocab_size=vocab_size, sequence_length=sequence_length, **arguments)
        for part in (self.token_embedding, self.position_embedding, self.blocks[0]):
            part.requires_grad_(False)


@dataclass(frozen=True)
class Case:
    """One row of the page."""

    strategy: str
    model: str
    shares: tuple[int, ...] = ()
    """Samples of each rank; empty: whatever the strategy's own options say."""
    options: tuple[str, ...] = ()
    ranks: int = 0

    @property
    def world_size(self) -> int:
        return self.ranks or len(self.shares)

    def overrides(self, devices: Sequence[str]) -> list[str]:
        chosen = ",".join(devices[rank % len(devices)] for rank in range(self.world_size))
        words = [f"strategy={self.strategy}", *MODELS[self.model], *COMMON, f"hardware.devices=[{chosen}]"]
        if any(device != "cpu" for device in devices):
            words.append("hardware.share_devices=true")
        if self.shares:
            words += ["balancing=manual", f"balancing.weights=[{','.join(map(str, self.shares))}]"]
        else:
            words.append("balancing=equal")
        return [*words, *self.options]


HEAD = (
    *("strategy", "model", "samples a rank", "options"),
    *("verdict", "loss", "parameters", "gradient norm", "control"),
)
ACCUMULATE, CLIP = "trainer.accumulate=4", "trainer.clip_norm=0.5"
MICROBATCHES = "strategy.num_microbatches=5"
CASES = [
    Case("ddp", "mlp", (24, 8)),
    Case("ddp", "mlp", (31, 1), (ACCUMULATE,)),
    Case("ddp", "mlp", (32, 0)),
    Case("ddp", "mlp", (20, 9, 3), ("trainer.microbatch_size=5", CLIP)),
    Case("ddp", "gpt", (24, 8), (CLIP,)),
    Case("ddp", "gpt, tied", (20, 9, 3), (ACCUMULATE, CLIP)),
    Case("ddp", "gpt, tied", (17, 9, 5, 1)),
    Case("ddp", "gpt, tied", (32, 0), ("trainer.accumulate=2",)),
    Case("ddp", "gpt, frozen parts", (24, 8)),
    Case("ddp", "gpt, experts", (24, 8), (ACCUMULATE, CLIP)),
    Case("ddp", "convnet, BatchNorm", (25, 7)),
    Case("pipeline", "gpt, tied", ranks=2),
    Case("pipeline", "gpt, tied", ranks=2, options=("strategy.shard_plan=[[0,3],[3,4]]", MICROBATCHES, CLIP)),
    Case("pipeline", "gpt, experts", ranks=2, options=("strategy.schedule=Interleaved1F1B", CLIP)),
    Case("pipeline", "gpt, frozen parts", ranks=3, options=("strategy.schedule=GPipe",)),
    Case("pipeline", "mlp", ranks=4),
    Case("hybrid", "gpt, tied", ranks=3, options=("strategy.groups=[[0,1],[2]]", CLIP)),
    Case("hybrid", "gpt, experts", ranks=3, options=("strategy.groups=[[0],[1,2]]", CLIP)),
    Case("hybrid", "gpt, frozen parts", ranks=4, options=("strategy.groups=[[0,1,2],[3]]",)),
    Case("hybrid", "mlp", ranks=4, options=("strategy.groups=[[0,1],[2,3]]", MICROBATCHES)),
]


def row(case: Case, certificate: Certificate | None, problem: str = "") -> str:
    shares = "/".join(map(str, case.shares)) or f"{case.world_size} ranks"
    options = ", ".join(option.partition(".")[2] for option in case.options) or "–"
    cells = [case.strategy, case.model, shares, options]
    if certificate is None:
        return line([*cells, problem, *[""] * 4])
    run, control = certificate.run, certificate.control
    cells += [f"**{certificate.verdict}**" if certificate.verdict != "exact" else "exact"]
    cells += [f"{run.loss_error:.1e}", f"{run.parameter_error:.1e}", f"{run.grad_norm_error:.1e}"]
    cells += [f"{control.parameter_error:.1e}" if control is not None else "–"]
    return line(cells)


def page(rows: list[str], steps: int, devices: Sequence[str]) -> str:
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, on {' and '.join(devices)}"
    return "\n".join(
        [
            "# Certificates",
            "",
            "Made by `benchmarks/certify.py`: what [`hetexp verify`](../how-to/verify.md) found for every "
            "strategy that claims to take the very steps of one device.",
            f"{datetime.now():%Y-%m-%d}, {machine}; torch {torch.__version__}, Python "
            f"{platform.python_version()}.",
            "",
            f"{steps} steps with AdamW in float64, 240 samples in global batches of 32 (so with short ones), "
            "beside the same steps on one device with the whole batch in",
            "one piece. The three errors are the largest of all steps, |Δ loss| / |loss|, ‖Δθ‖₂ / ‖θ‖₂ and "
            f"|Δ‖g‖₂| / ‖g‖₂; at most {EXACT:g} is exact. GPTs are masked: six tokens of ten do not count.",
            "The control averages over ranks as plain data parallelism does, and must fail on unequal "
            "shares; the last column is the error of its parameters.",
            "",
            table(HEAD, []),
            *rows,
            "",
        ]
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", help="a strategy")
    parser.add_argument("--device", action="append", help="for the ranks in turn; cpu by default")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    devices = options.device or ["cpu"]
    available = group_options("strategy")
    rows, wrong = [], 0
    console = Console(stderr=True)
    for case in CASES:
        if options.only not in (None, case.strategy):
            continue
        if case.strategy not in available:
            rows.append(row(case, None, "not available"))
            continue
        console.print(f"{case.strategy}, {case.model}, {case.world_size} ranks …", highlight=False)
        with tempfile.TemporaryDirectory() as folder:
            certificate = verify(case.overrides(devices), Path(folder, "out"), options.steps)
        wrong += certificate.verdict != "exact"
        rows.append(row(case, certificate))
        console.print(rows[-1], markup=False, highlight=False, soft_wrap=True)
    options.output.write_text(page(rows, options.steps, devices), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
