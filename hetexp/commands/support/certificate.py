"""The certificate of `hetexp verify`: two runs compared step by step, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hetexp.core.lines import all_rows

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
EXACT = 1e-12
"""Largest relative difference in float64, of loss, parameters and gradient norm (docs/architecture.md)."""
FLOAT32_FACTOR = 2.0
"""In float32: times the largest difference between runs on one device that differ in microbatch size only."""

Verdict = Literal["exact", "not exact", "not conclusive"]


@dataclass(frozen=True)
class StepDifference:
    """How far one step of a run is from the same step of the reference."""

    step: int
    loss: float
    loss_error: float
    """|Δ| / |reference|."""
    parameter_error: float
    """‖Δθ‖₂ / ‖θ‖₂ over all tensors of the saved model, after the step."""
    worst_tensor: str
    """The tensor with the largest part of it."""
    grad_norm: float
    """Norm of the whole batch's gradient, before clipping."""
    grad_norm_error: float
    """|Δ| / |reference|."""


@dataclass(frozen=True)
class Comparison:
    """A run beside its reference: the largest error of all steps, and each step's own."""

    loss_error: float
    parameter_error: float
    grad_norm_error: float
    steps: tuple[StepDifference, ...]

    def within(self, tolerance: Tolerance) -> bool:
        """Tell whether loss, parameters and gradient norm are as near as they must be, at every step.

        The norm shows a scale of the gradient, to which clipping and optimizers like Adam are blind.
        """
        return (
            self.loss_error <= tolerance.loss
            and self.parameter_error <= tolerance.parameters
            and self.grad_norm_error <= tolerance.grad_norm
        )


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that still count as exact."""

    loss: float = EXACT
    parameters: float = EXACT
    grad_norm: float = EXACT
    source: str = "float64"

    @classmethod
    def of_microbatches(cls, others: Sequence[Comparison]) -> Tolerance:
        """Return what runs on one device allow that differ in microbatch size only."""
        return cls(
            FLOAT32_FACTOR * max(other.loss_error for other in others),
            FLOAT32_FACTOR * max(other.parameter_error for other in others),
            FLOAT32_FACTOR * max(other.grad_norm_error for other in others),
            "twice what microbatches of another size change on one device",
        )


@dataclass(frozen=True)
class Certificate:
    """All that was measured, and the verdict."""

    facts: dict[str, Any]
    """When, where and of what: plain types."""
    run: Comparison
    tolerance: Tolerance
    control: Comparison | None = None
    """The same run with plain averaging over the ranks, `debug.normalizer=per_rank`."""
    control_must_differ: bool = False
    """Whether the ranks' shares differ, so that plain averaging is wrong."""

    @property
    def verdict(self) -> Verdict:
        """`not conclusive`: the run is near enough, but so is the control that should not be."""
        if not self.run.within(self.tolerance):
            return "not exact"
        if self.control_must_differ and (self.control is None or self.control.within(self.tolerance)):
            return "not conclusive"
        return "exact"

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, for `certificate.json`."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "tolerance": asdict(self.tolerance),
            **self.facts,
            "run": asdict(self.run),
            "control": asdict(self.control) if self.control is not None else None,
            "control_must_differ": self.control_must_differ,
        }

    def markdown(self) -> str:
        """Return the certificate for people."""
        facts = self.facts
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        lines = [
            f"# {facts['strategy']} on {len(facts['devices'])} device(s): {self.verdict}",
            "",
            f"{facts['date']}, {versions}; {facts['machine']}.",
            "",
            f"`{' '.join(facts['overrides'])}`" if facts["overrides"] else "The default configuration.",
            "",
            *(["**Emulated devices**: the CPU does their arithmetic.", ""] if facts["emulated"] else []),
            *_table(
                ["device", "name", "samples a step"],
                [[device["id"], device["name"], str(device["samples"])] for device in facts["devices"]],
            ),
            "",
            f"Compared with {facts['reference']} alone: {facts['precision']}, no dropout, {facts['cut']}.",
            "",
            *_table(
                ["step", "loss", "loss, off by", "parameters, off by", "most in", "gradient norm, off by"],
                [
                    [
                        str(step.step),
                        f"{step.loss:.6g}",
                        f"{step.loss_error:.1e}",
                        f"{step.parameter_error:.1e}",
                        f"`{step.worst_tensor}`" if step.parameter_error else "–",
                        f"{step.grad_norm_error:.1e}",
                    ]
                    for step in self.run.steps
                ],
            ),
            "",
            f"Allowed: loss {self.tolerance.loss:.1e}, parameters {self.tolerance.parameters:.1e}, "
            f"gradient norm {self.tolerance.grad_norm:.1e} ({self.tolerance.source}).",
            "",
            self._of_control(),
        ]
        return "\n".join(lines) + "\n"

    def _of_control(self) -> str:
        if self.control is None:
            return "There is no control: nothing is averaged over ranks."
        off = f"loss {self.control.loss_error:.1e}, parameters {self.control.parameter_error:.1e} off"
        text = f"Control: averaging as plain data parallelism does (`debug.normalizer=per_rank`) is {off}"
        if not self.control_must_differ:
            return f"{text}; the ranks' shares are equal, for which it is right unless targets are masked."
        if self.control.within(self.tolerance):
            return f"{text}: it should be wrong on unequal shares, so this run proves nothing."
        return f"{text}, wrong as it must be on unequal shares."


def compare(run: Path, reference: Path) -> Comparison:
    """Compare two run folders that have a line and a checkpoint of every step.

    Raises:
        ValueError: their steps or the names of their tensors differ.
    """
    ours, theirs = _lines(run), _lines(reference)
    if [line["step"] for line in ours] != [line["step"] for line in theirs]:
        raise ValueError(f"{run} and {reference} have not done the same steps")
    steps = tuple(
        _difference(line, other, tensors_at(run, line["step"]), tensors_at(reference, line["step"]))
        for line, other in zip(ours, theirs, strict=True)
    )
    return Comparison(
        max(step.loss_error for step in steps),
        max(step.parameter_error for step in steps),
        max(step.grad_norm_error for step in steps),
        steps,
    )


def _difference(
    line: dict[str, Any], other: dict[str, Any], ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> StepDifference:
    if ours.keys() != theirs.keys():
        raise ValueError(f"tensors differ: {sorted(ours.keys() ^ theirs.keys())}")
    squares = {name: float((ours[name].double() - theirs[name].double()).square().sum()) for name in ours}
    size = sum(float(tensor.double().square().sum()) for tensor in theirs.values())
    return StepDifference(
        step=line["step"],
        loss=_number(line["train/loss"]),
        loss_error=_relative(line["train/loss"], other["train/loss"]),
        parameter_error=_worst(math.sqrt(sum(squares.values()) / size) if size else math.inf),
        worst_tensor=max(squares, key=lambda name: _worst(squares[name])),
        grad_norm=_number(line["train/grad_norm"]),
        grad_norm_error=_relative(line["train/grad_norm"], other["train/grad_norm"]),
    )


def _relative(value: float | None, reference: float | None) -> float:
    a, b = _number(value), _number(reference)
    return 0.0 if a == b else _worst(abs(a - b) / abs(b) if b else math.inf)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _worst(value: float) -> float:
    """Return the value; what is no number is as far off as can be."""
    return math.inf if math.isnan(value) else value


def tensors_at(run: Path, step: int) -> dict[str, Tensor]:
    """Return the model's tensors after a step of a run that saved it."""
    from safetensors.torch import load_file

    from hetexp.checkpoint.folder import MODEL
    from hetexp.checkpoint.manifest import folder_name

    loaded: dict[str, Tensor] = load_file(run / "checkpoints" / folder_name(step) / MODEL)
    return loaded


def _lines(run: Path) -> list[dict[str, Any]]:
    return [row for row in all_rows(run / "metrics.jsonl") if "train/loss" in row]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
