"""What `hetexp verify` found out: two runs compared step by step, and the words and files made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    """The one that has most of it."""
    grad_norm: float
    """Of the whole batch's gradient, before clipping."""
    grad_norm_error: float
    """|Δ| / |reference|."""


@dataclass(frozen=True)
class Comparison:
    """A run beside its reference."""

    steps: tuple[StepDifference, ...]

    @property
    def loss_error(self) -> float:
        """The largest of all steps."""
        return max(step.loss_error for step in self.steps)

    @property
    def parameter_error(self) -> float:
        """The largest of all steps."""
        return max(step.parameter_error for step in self.steps)

    @property
    def grad_norm_error(self) -> float:
        """The largest of all steps."""
        return max(step.grad_norm_error for step in self.steps)

    def within(self, tolerance: Tolerance) -> bool:
        """Tell whether loss, parameters and gradient norm are as near as they must be, at every step.

        The norm shows a scale of the gradient, to which clipping and optimizers like Adam are blind.
        """
        return (
            self.loss_error <= tolerance.loss
            and self.parameter_error <= tolerance.parameters
            and self.grad_norm_error <= tolerance.grad_norm
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return {
            "loss_error": self.loss_error,
            "parameter_error": self.parameter_error,
            "grad_norm_error": self.grad_norm_error,
            "steps": [asdict(step) for step in self.steps],
        }


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
            FLOAT32_FACTOR * max(one.loss_error for one in others),
            FLOAT32_FACTOR * max(one.parameter_error for one in others),
            FLOAT32_FACTOR * max(one.grad_norm_error for one in others),
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
            "run": self.run.to_dict(),
            "control": self.control.to_dict() if self.control is not None else None,
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
                [[one["id"], one["name"], str(one["samples"])] for one in facts["devices"]],
            ),
            "",
            f"Compared with {facts['reference']} alone: {facts['precision']}, no dropout, {facts['cut']}.",
            "",
            *_table(
                ["step", "loss", "loss, off by", "parameters, off by", "most in", "gradient norm, off by"],
                [
                    [
                        str(one.step),
                        f"{one.loss:.6g}",
                        f"{one.loss_error:.1e}",
                        f"{one.parameter_error:.1e}",
                        f"`{one.worst_tensor}`" if one.parameter_error else "–",
                        f"{one.grad_norm_error:.1e}",
                    ]
                    for one in self.run.steps
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
        found = f"loss {self.control.loss_error:.1e}, parameters {self.control.parameter_error:.1e} off"
        text = f"Control: averaging as plain data parallelism does (`debug.normalizer=per_rank`) is {found}"
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
    if [one["step"] for one in ours] != [one["step"] for one in theirs]:
        raise ValueError(f"{run} and {reference} have not done the same steps")
    return Comparison(
        tuple(
            _difference(one, other, tensors_at(run, one["step"]), tensors_at(reference, one["step"]))
            for one, other in zip(ours, theirs, strict=True)
        )
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


def _relative(one: float | None, other: float | None) -> float:
    a, b = _number(one), _number(other)
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
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "train/loss" in row]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
