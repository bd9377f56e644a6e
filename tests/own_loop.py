"""A person's own training script, as `hetexp launch` runs it, and the same loop without hetexp.

    own_loop.py CASE FOLDER [--steps N] [--fail-at N]

Every rank writes what each of its steps left to `FOLDER/rank_<rank>.pt`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import hetexp
from hetexp.data.sampler import GlobalSampler, Position
from hetexp.training.loss import Loss

BATCH = 32
CLIP = 0.5
SEED = 3
SAMPLES = 66
"""Two batches and a tail of 2, of which most ranks get nothing."""


CLASS_WEIGHTS = torch.tensor([0.5, 1.7, 1.1], dtype=torch.float64)


class Weighted(Loss):
    """Cross entropy whose mean is taken over the classes' weights, as torch's own is."""

    def count(self, targets: torch.Tensor) -> float:
        return float(CLASS_WEIGHTS[targets].sum())

    def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, targets, CLASS_WEIGHTS.to(output), reduction="sum")


class TwoHeads(nn.Module):
    """Gives classes and numbers, each by weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.numbers = nn.Linear(5, 16), nn.Linear(16, 3), nn.Linear(16, 2)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(inputs).tanh()
        return self.classes(hidden), self.numbers(hidden)


Term = tuple[torch.Tensor, float | torch.Tensor]


def two_losses(output: Any, inputs: torch.Tensor, targets: torch.Tensor) -> list[Term]:
    """Return two means with their counts: over the classes that are known, and over all positive numbers."""
    classes, numbers = output
    wanted = inputs[:, :2] * 2
    kept = wanted > 0
    return [
        (functional.cross_entropy(classes, targets), (targets != -100).sum()),
        (0.3 * functional.mse_loss(numbers[kept], wanted[kept]), float(kept.sum())),
    ]


def tokens() -> TensorDataset:
    """Return sequences of 6 tokens of which between none and all have a label."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(11, (SAMPLES, 6), generator=generator)
    kept = torch.rand(SAMPLES, 1, generator=generator) * 2 - 0.7  # many samples have no label at all
    labels = words.roll(1, dims=1)
    labels[torch.rand(SAMPLES, 6, generator=generator) > kept] = -100
    return TensorDataset(words, labels)


def rows(masked: bool) -> TensorDataset:
    """Return vectors and classes, in float64 and half of them without a class where that is wanted."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    classes = inputs[:, :3].argmax(dim=1)
    if masked:
        classes[torch.rand(SAMPLES, generator=generator) < 0.5] = -100
    return TensorDataset(inputs.double() if masked else inputs, classes)


def make(case: str) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """Return model, optimizer and data of a case; the weights are the same each time."""
    torch.manual_seed(0)
    model: nn.Module
    if case == "tokens":
        model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 11)).double()
    elif case == "weighted":
        model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    elif case == "several":
        model = TwoHeads().double()
    elif case == "norm":
        model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double()
    else:
        model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if case == "weighted":
        inputs, classes = rows(masked=False).tensors
        return model, optimizer, TensorDataset(inputs.double(), classes)
    return model, optimizer, tokens() if case == "tokens" else rows(masked=case in ("norm", "several"))


def mean_loss(output: torch.Tensor, targets: torch.Tensor, case: str = "") -> torch.Tensor:
    """Return the mean over what has a label; NaN where nothing has."""
    if case == "weighted":
        return functional.cross_entropy(output, targets, CLASS_WEIGHTS)
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain_loop(case: str, steps: int) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Train in this process without hetexp, each batch in one piece; yield each step's loss and weights."""
    model, optimizer, data = make(case)
    sampler, position = GlobalSampler(SAMPLES, BATCH, SEED), Position()
    for _ in range(steps):
        indices, position = sampler.batch(position)
        inputs, targets = data[indices.tolist()]
        optimizer.zero_grad()
        if case == "several":
            (a, _), (b, _) = two_losses(model(inputs), inputs, targets)
            loss = a + b
        else:
            loss = mean_loss(model(inputs), targets, case)
        loss.backward()
        if case == "tokens":
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        yield float(loss.detach()), snapshot(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()

    model, optimizer, data = make(options.case)
    if options.case != "tokens":
        torch.manual_seed(torch.initial_seed() + 1)  # what a script draws for itself may differ
    run = hetexp.setup(
        model,
        optimizer,
        data,
        global_batch_size=BATCH,
        seed=SEED,
        accumulate=options.accumulate,
        eval_dataset=data,
        log_every=1,
    )
    told: list[dict[str, Any]] = []
    losses: list[float] = []
    counts: list[int] = []
    while run.step < options.steps:
        for inputs, targets in run.batches():
            if run.rank == 1 and run.step == options.fail_at:
                raise ArithmeticError("this script does not like its data")
            counts.append(int((targets != -100).sum()))
            if options.case == "several":
                terms = two_losses(run.model(inputs), inputs, targets)
                losses.append(float(terms[0][0].detach()))
                run.backward(terms)
            else:
                loss = mean_loss(run.model(inputs), targets, options.case)
                losses.append(float(loss.detach()))
                weighted = options.case == "weighted"
                run.backward(loss, count=CLASS_WEIGHTS[targets].sum() if weighted else counts[-1])
            if run.step_due:
                norm = run.clip_norm(CLIP if options.case == "tokens" else 1e9)
                optimizer.step()
                optimizer.zero_grad()
                told.append({"norm": float(norm), "weights": snapshot(model)})
            if run.step == options.steps and run.step_due:
                break
    evaluation = run.evaluate(lambda batch: test(run.model, batch))
    logged = run.log(mine=run.rank)
    torch.save(
        {
            "steps": told,
            "losses": losses,
            "counts": counts,
            "evaluation": evaluation,
            "logged": logged,
            "device": str(run.device),
        },
        options.folder / f"rank_{run.rank}.pt",
    )
    run.save()


def test(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    inputs, targets = batch
    output = model(inputs)
    output = output[0] if isinstance(output, tuple) else output
    right = (output.argmax(dim=-1) == targets).sum()
    total = functional.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum")
    return {"loss": total, "accuracy": right, "count": (targets != -100).sum()}


if __name__ == "__main__":
    main()
