"""The certificate of `hetexp verify`: the differences of two runs at each step, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hetexp.core.lines import all_rows

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
EXACT = 1e-12
"""Largest relative difference in float64, of loss, parameters and gradient norm (docs/explanation)."""
FLOAT32_FACTOR = 2.0
"""Allowed in float32, × the largest difference between single-device runs of other microbatch sizes."""

Verdict = Literal["exact", "not exact", "not conclusive"]


@dataclass(frozen=True)
class StepDifference:
    """The differences between one step of a run and the same step of its reference."""

    step: int
    loss: float
    loss_error: float
    """|Δ| / |reference|."""
    parameter_error: float
    """‖Δθ‖₂ / ‖θ‖₂ over all tensors of the saved model, after the step."""
    worst_tensor: str
    """The tensor with the largest part of `parameter_error`."""
    grad_norm: float
    """Norm of the whole batch's gradient, before clipping."""
    grad_norm_error: float
    """|Δ| / |reference|."""
    samples: int | None = None
    """Samples of the step, if the run has logged them."""


@dataclass(frozen=True)
class Comparison:
    """The differences between a run and its reference: each step's, and the largest of all steps."""

    loss_error: float
    parameter_error: float
    grad_norm_error: float
    steps: tuple[StepDifference, ...]

    def within(self, tolerance: Tolerance) -> bool:
        """Return whether loss, parameters and gradient norm are within the tolerance at every step.

        The norm shows a wrong scale of the gradient, which clipping and optimizers like Adam hide.
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
        """Return the tolerance that single-device runs of other microbatch sizes justify."""
        return cls(
            FLOAT32_FACTOR * max(other.loss_error for other in others),
            FLOAT32_FACTOR * max(other.parameter_error for other in others),
            FLOAT32_FACTOR * max(other.grad_norm_error for other in others),
            "twice what microbatches of another size change on one device",
        )


@dataclass(frozen=True)
class Certificate:
    """The measured differences of a run, and the verdict."""

    facts: dict[str, Any]
    """Date, machine, versions, devices and settings, as plain types."""
    run: Comparison
    tolerance: Tolerance
    control: Comparison | None = None
    """The same run with plain averaging over the ranks, `debug.normalizer=per_rank`."""
    control_must_differ: bool = False
    """Whether the ranks' shares differ, so that plain averaging is wrong."""
    cause: str | None = None
    """A sentence on why a run is not exact, if that is known."""

    @property
    def verdict(self) -> Verdict:
        """`not conclusive`: the run is within the tolerance, but so is the control, which must not be."""
        if not self.run.within(self.tolerance):
            return "not exact"
        if self.control_must_differ and (self.control is None or self.control.within(self.tolerance)):
            return "not conclusive"
        return "exact"

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as plain types, for `certificate.json`."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "tolerance": asdict(self.tolerance),
            **self.facts,
            "run": asdict(self.run),
            "control": asdict(self.control) if self.control is not None else None,
            "control_must_differ": self.control_must_differ,
            "cause": self.cause,
        }

    def markdown(self) -> str:
        """Return the certificate as Markdown, for `certificate.md`."""
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
            *([f"{self._short_batches()}", ""] if self._short_batches() else []),
            self._control_text(),
            *(["", f"**Cause**: {self.cause}"] if self.cause is not None else []),
        ]
        return "\n".join(lines) + "\n"

    def _short_batches(self) -> str:
        """Return a sentence about the steps with fewer samples than others, if there are any."""
        sizes = [step.samples for step in self.run.steps if step.samples is not None]
        short = [step for step in self.run.steps if step.samples is not None and step.samples < max(sizes)]
        return "; ".join(
            f"Step {s.step} is a short batch of {s.samples} samples" for s in short
        ) + "." * bool(short)

    def _control_text(self) -> str:
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
    """Return the differences between two run folders with a log line and a checkpoint of every step.

    Raises:
        ValueError: their steps or the names of their tensors differ.
    """
    run_lines, reference_lines = _lines(run), _lines(reference)
    if [line["step"] for line in run_lines] != [line["step"] for line in reference_lines]:
        raise ValueError(f"{run} and {reference} have not done the same steps")
    totals = [0, *(line.get("train/samples") for line in run_lines)]
    steps = tuple(
        replace(
            _difference(line, other, tensors_at(run, line["step"]), tensors_at(reference, line["step"])),
            samples=None if after is None else after - (before or 0),
        )
        for line, other, before, after in zip(run_lines, reference_lines, totals, totals[1:], strict=False)
    )
    return Comparison(
        max(step.loss_error for step in steps),
        max(step.parameter_error for step in steps),
        max(step.grad_norm_error for step in steps),
        steps,
    )


def _difference(
    line: dict[str, Any], other: dict[str, Any], tensors: dict[str, Tensor], references: dict[str, Tensor]
) -> StepDifference:
    if tensors.keys() != references.keys():
        raise ValueError(f"tensors differ: {sorted(tensors.keys() ^ references.keys())}")
    squares = {
        name: float((tensor.double() - references[name].double()).square().sum())
        for name, tensor in tensors.items()
    }
    size = sum(float(tensor.double().square().sum()) for tensor in references.values())
    return StepDifference(
        step=line["step"],
        loss=_number(line["train/loss"]),
        loss_error=_relative(line["train/loss"], other["train/loss"]),
        parameter_error=_nan_as_infinity(math.sqrt(sum(squares.values()) / size) if size else math.inf),
        worst_tensor=max(squares, key=lambda name: _nan_as_infinity(squares[name])),
        grad_norm=_number(line["train/grad_norm"]),
        grad_norm_error=_relative(line["train/grad_norm"], other["train/grad_norm"]),
    )


def _relative(value: float | None, reference: float | None) -> float:
    a, b = _number(value), _number(reference)
    return 0.0 if a == b else _nan_as_infinity(abs(a - b) / abs(b) if b else math.inf)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _nan_as_infinity(value: float) -> float:
    """Return the error; NaN counts as the largest one."""
    return math.inf if math.isnan(value) else value


def tensors_at(run: Path, step: int) -> dict[str, Tensor]:
    """Return the model's tensors after a step, from the run's checkpoint of it."""
    from safetensors.torch import load_file

    from hetexp.checkpoint.folder import MODEL
    from hetexp.checkpoint.manifest import folder_name

    loaded: dict[str, Tensor] = load_file(run / "checkpoints" / folder_name(step) / MODEL)
    return loaded


def _lines(run: Path) -> list[dict[str, Any]]:
    return [row for row in all_rows(run / "metrics.jsonl") if "train/loss" in row]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
