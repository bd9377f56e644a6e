"""The runs that show how long a step waits for the exchange of gradients, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchlib.tables import figure, median_of, ratio, table
from ddp_bench.page import where
from ddp_bench.task import QUIET, Size, words_of

WITHOUT = "none"
"""Stands for runs that leave the exchange out."""
WIRES = ("float32", "bfloat16", "int8")
WIRE_LEARNING_RATE, WIRE_WARMUP_STEPS = 3e-4, 20


@dataclass(frozen=True)
class Ranks:
    """Two ranks, and what each is given of a step."""

    devices: tuple[str, ...]
    """`cuda:0`, `cpu`; a card that is named twice is shared by two ranks."""
    split: tuple[int, ...]
    """Samples of a step."""
    start_method: str = "subprocess"

    def words(self) -> list[str]:
        """Return the overrides that choose them."""
        shared = len(set(self.devices)) < len(self.devices) and "cpu" not in self.devices
        chosen = [f"hardware.devices=[{','.join(self.devices)}]"]
        if shared:
            numbers = ",".join(device.partition(":")[2] for device in self.devices)
            chosen = [f"hardware.gpu_ids=[{numbers}]", "hardware.share_devices=true"]
        return [
            *chosen,
            "strategy=ddp",
            "balancing=manual",
            f"balancing.weights=[{','.join(map(str, self.split))}]",
            f"launch.start_method={self.start_method}",
        ]


def timed(ranks: Ranks, size: Size, backend: str, steps: int, precision: str) -> list[str]:
    """Return the overrides of a run whose steps are timed, and whose losses are kept, one by one."""
    last = "debug.exchange=false" if backend == WITHOUT else f"comm.backend={backend}"
    return [
        *words_of(size, sum(ranks.split), steps, precision),
        *ranks.words(),
        "model._target_=exposed_bench.repeatable.RepeatableGPT",
        "optimizer.fused=true",  # torch's other update takes the CPU longer than its passes
        "trainer.log_every=1",
        last,
    ]


def trained(ranks: Ranks, size: Size, backend: str, wire: str, steps: int, precision: str) -> list[str]:
    """Return the overrides of a run on the text that ships with hetexp, evaluated at its end."""
    return [
        "model=gpt",
        *(f"model.{key}={str(value).lower()}" for key, value in size.model().items()),
        "data=text",
        f"data.sequence_length={size.sequence_length}",
        "optimizer=adamw",
        f"optimizer.lr={WIRE_LEARNING_RATE}",
        f"trainer.precision={precision}",
        f"trainer.global_batch_size={sum(ranks.split)}",
        f"trainer.fast_dev_run={steps}",
        "trainer.schedule=cosine",
        f"trainer.warmup_steps={min(WIRE_WARMUP_STEPS, steps // 2)}",
        f"trainer.log_every={max(1, steps // 10)}",
        *QUIET,
        *ranks.words(),
        f"comm.backend={backend}",
        *([f"comm.wire={wire}"] if wire != "float32" else []),
    ]


def with_characters(size: Size, num_layers: int) -> Size:
    """Return the size for text: its vocabulary is the text's, so that it takes more layers to be as large."""
    return replace(size, num_layers=num_layers)


def exposed(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """Return what each exchange costs a step: beyond a step without it, and by hetexp's summary.

    Args:
        runs: of each backend and of `WITHOUT`; `losses` step by step.
    """
    alone = median_of(runs[WITHOUT], "step_s")
    names = [name for name in runs if name != WITHOUT]
    found: dict[str, dict[str, float | None]] = {}
    for name in names:
        step = median_of(runs[name], "step_s")
        found[name] = {
            "step_s": step,
            "beyond_s": step - alone if step is not None and alone is not None else None,
            "exposed_s": median_of([run["comm"] for run in runs[name]], "exposed_s"),
            "loss_differs": largest_difference([run["losses"] for run in (runs[names[0]][0], *runs[name])]),
        }
    return found


def largest_difference(curves: Sequence[Sequence[float]]) -> float:
    """Return how far any loss of these runs is from that of the first of them at the same step."""
    first = curves[0]
    return max(abs(a - b) for curve in curves for a, b in zip(first, curve, strict=True))


def timed_table(results: dict[str, Any]) -> str:
    """Step time and exposed exchange of each backend, beside the first one."""
    runs, facts = results["runs"], results["facts"]
    found = exposed(runs)
    base = next(iter(found.values()))
    alone = median_of(runs[WITHOUT], "step_s")
    rows = [["left out", _ms(alone), "–", "–", "–", "–", "–"]]
    for name, one in found.items():
        rows.append(
            [
                f"`{name}`",
                _ms(one["step_s"]),
                _ms(one["beyond_s"]),
                figure(ratio(one["beyond_s"], base["beyond_s"]), ".3f"),
                _ms(one["exposed_s"]),
                figure(ratio(one["exposed_s"], base["exposed_s"]), ".3f"),
                f"{one['loss_differs']:.1e}" if one["loss_differs"] else "0",
            ]
        )
    head = ["exchange", "step, ms", "beyond, ms", "÷ first", "exposed, ms", "÷ first", "losses differ by"]
    last = runs[WITHOUT][-1]
    title = (
        f"{where(last['devices'], last['torch'])}; {facts['parameters']:,} weights, sequence "
        f"{facts['sequence_length']}, {' / '.join(map(str, facts['split']))} samples, {facts['precision']}, "
        f"{facts['steps']} steps after {facts['warm_steps']}; medians of {len(runs[WITHOUT])} runs in turn."
    )
    return "\n".join([title, "", table(head, rows)])


def wires_table(results: dict[str, Any]) -> str:
    """Loss and bytes of each wire beside float32's."""
    runs, facts = results["runs"], results["facts"]
    base = runs["float32"]
    rows = []
    for wire, run in runs.items():
        off = run["eval_loss"] / base["eval_loss"] - 1
        sent, whole = run["comm"]["bytes_per_step"], base["comm"]["bytes_per_step"]
        rows.append(
            [
                f"`{wire}`",
                f"{run['eval_loss']:.4f}",
                "" if wire == "float32" else f"{off:+.2%}",
                figure(sent, ",.0f"),
                figure(ratio(whole, sent), ".2f"),
                _ms(run["step_s"]),
            ]
        )
    head = ["wire", "validation loss", "against float32", "bytes a step", "× fewer", "step, ms"]
    title = (
        f"{where(base['devices'], base['torch'])}; {facts['parameters']:,} weights, "
        f"{facts['steps']} steps of {sum(facts['split'])} samples of {facts['sequence_length']} characters, "
        f"{facts['precision']}, `comm.backend={facts['backend']}`."
    )
    return "\n".join([title, "", table(head, rows)])


def _ms(seconds: float | None) -> str:
    return figure(seconds, ",.1f", 1e3)
