"""A person's own training with CLIP's loss, whose samples depend on each other, and the same without hetexp.

    contrastive.py rows|whole|alone|accumulated FOLDER

Every rank writes the weights after each of its steps to `FOLDER/rank_<rank>.pt`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import hetexp
from hetexp.data.sampler import GlobalSampler, Position

SAMPLES, BATCH, SEED, STEPS = 35, 16, 3, 8
"""Two batches and a tail of 3, of which a rank of a small share gets nothing."""


class Clip(nn.Module):
    """Two towers, and the scale of their products, which the loss uses directly."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.logit_scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        images, texts = self.image(image), self.text(text)
        return (
            functional.normalize(images, dim=-1),
            functional.normalize(texts, dim=-1),
            self.logit_scale.exp(),
        )


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    shared = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    parts = [torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64) for width in (3, 2)]
    return TensorDataset(*(torch.cat([shared, part], dim=1) for part in parts))


def make() -> tuple[Clip, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Clip().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def loss_of(
    images: torch.Tensor, texts: torch.Tensor, scale: torch.Tensor, rows: slice = slice(None)
) -> torch.Tensor:
    """Return CLIP's loss over some rows of the batch."""
    places = torch.arange(len(images), device=images.device)[rows]
    by_image = functional.cross_entropy(scale * images[rows] @ texts.T, places)
    return (by_image + functional.cross_entropy(scale * texts[rows] @ images.T, places)) / 2


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain_loop() -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Train in this process without hetexp; yield each step's loss and weights."""
    model, optimizer = make()
    sampler, position, samples = GlobalSampler(SAMPLES, BATCH, SEED), Position(), data()
    for _ in range(STEPS):
        indices, position = sampler.batch(position)
        loss = loss_of(*model(*samples[indices.tolist()]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach()), snapshot(model)


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    model, optimizer = make()
    accumulate = 2 if case == "accumulated" else 1
    run = hetexp.setup(
        model, optimizer, data(), global_batch_size=BATCH, seed=SEED, log_every=1, accumulate=accumulate
    )
    steps = []
    while run.step < STEPS:
        for image, text in run.batches():
            images, texts, scale = run.model(image, text)
            if case != "alone":
                images, texts = run.gather(images), run.gather(texts)
            rows = run.rows if case == "rows" else slice(None)
            run.backward(loss_of(images, texts, scale, rows))
            optimizer.step()
            optimizer.zero_grad()
            steps.append(snapshot(model))
            if run.step == STEPS:
                break
    torch.save(steps, folder / f"rank_{run.rank}.pt")


if __name__ == "__main__":
    main()
