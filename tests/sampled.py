"""Samples in the forms that people have: dicts, parts, sequences and images of different size, graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset

from hetexp.training.loss import Loss

WIDTH, CLASSES, TOKENS = 8, 3, 7


class Made(Dataset[Any]):
    """Samples that a function makes, each from its own generator and its number."""

    def __init__(self, make: Callable[[torch.Generator, int], Any], length: int) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(index)
        return self.make(torch.Generator().manual_seed(index), index)


class Both:
    """Training data, and the samples after them as evaluation data.

    Args:
        form: name of a function of this module.
    """

    def __init__(self, form: str, num_samples: int = 60) -> None:
        make = globals()[form]
        self.train = Made(make, num_samples)
        self.evaluation = Made(lambda _, n: make(torch.Generator().manual_seed(999 + n), n), 22)


def wrong_evaluation() -> Both:
    """Return data with a wrong label in the evaluation alone."""
    data = Both("as_dict")
    data.evaluation = Made(own_late, 60)
    return data


def only_train(form: str, num_samples: int = 60) -> Made:
    """Return training data without evaluation data."""
    return Made(globals()[form], num_samples)


def pair(generator: torch.Generator, _: int) -> Any:
    x = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    return x, x[:CLASSES].argmax()


def as_dict(generator: torch.Generator, index: int) -> Any:
    x, label = pair(generator, index)
    return {"x": x, "labels": label}


def three(generator: torch.Generator, index: int) -> Any:
    x, label = pair(generator, index)
    return x[:5], x[5:], label


def one_hot(generator: torch.Generator, index: int) -> Any:
    x, label = pair(generator, index)
    return x, nn.functional.one_hot(label, CLASSES)


def int32(generator: torch.Generator, index: int) -> Any:
    x, label = pair(generator, index)
    return x, label.int()


def from_one_on(generator: torch.Generator, index: int) -> Any:
    x, label = pair(generator, index)
    return x, label + 1 if index != 1 else torch.tensor(CLASSES)


def own_wrong(generator: torch.Generator, index: int) -> Any:
    x, label = from_one_on(generator, index)
    return {"x": x, "labels": label}


def own_late(generator: torch.Generator, index: int) -> Any:
    x, label = late(generator, index)
    return {"x": x, "labels": label}


def late(generator: torch.Generator, index: int) -> Any:
    x, label = pair(generator, index)
    return x, torch.tensor(5) if index == 41 else label


def sequence(generator: torch.Generator, index: int) -> Any:
    tokens = torch.randint(TOKENS, (3 + index % 5,), generator=generator)
    return {"ids": tokens, "labels": (tokens * 3 + 1) % TOKENS}


def square(generator: torch.Generator, index: int) -> Any:
    """As many tokens as classes, but for the first two samples: the shapes fit in two ways."""
    tokens = torch.randint(TOKENS, (3 if index < 2 else TOKENS,), generator=generator)
    return {"ids": tokens, "labels": (tokens * 3 + 1) % TOKENS}


def broken(generator: torch.Generator, index: int) -> Any:
    raise OSError(f"no file for sample {index}")


def tokens(generator: torch.Generator, index: int) -> Any:
    sample = sequence(generator, index)
    return sample["ids"], sample["labels"]


def stacked(samples: list[Any]) -> Any:
    """Cut sequences to the shortest one of a batch."""
    length = min(len(ids) for ids, _ in samples)
    return tuple(torch.stack([row[:length] for row in column]) for column in zip(*samples, strict=True))


def rows(generator: torch.Generator, index: int) -> Any:
    """The same as lists of numbers, as data sets of Hugging Face give them without a format."""
    return {key: value.tolist() for key, value in sequence(generator, index).items()}


def boxes(generator: torch.Generator, index: int) -> Any:
    image = torch.randn(3, 5 + index % 3, 6 + index % 4, generator=generator, dtype=torch.float64)
    return image, {"boxes": torch.rand(1 + index % 3, 4, generator=generator, dtype=torch.float64)}


def named_boxes(generator: torch.Generator, index: int) -> Any:
    image, found = boxes(generator, index)
    return {"image": image, **found}


def unknown_token(generator: torch.Generator, index: int) -> Any:
    sample = sequence(generator, index)
    return sample | {"ids": sample["ids"] + (index == 1) * 2 * TOKENS}


def points(generator: torch.Generator, index: int) -> Any:
    return torch.randn(2 + index % 5, 4, generator=generator, dtype=torch.float64), index % CLASSES


class Graphs:
    """A batch class as those of graph libraries: it has a method `to`, and no tensor has a row a sample."""

    def __init__(self, nodes: torch.Tensor, graph: torch.Tensor, y: torch.Tensor) -> None:
        self.nodes, self.graph, self.y = nodes, graph, y

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Graphs:
        return Graphs(function(self.nodes), function(self.graph), function(self.y))

    def to(self, device: torch.device) -> Graphs:
        return self.apply(lambda tensor: tensor.to(device))


def batched_graphs(samples: list[Any]) -> Graphs:
    nodes = [nodes for nodes, _ in samples]
    graph = torch.repeat_interleave(torch.arange(len(nodes)), torch.tensor([len(n) for n in nodes]))
    return Graphs(torch.cat(nodes), graph, torch.tensor([label for _, label in samples]))


def packed(samples: list[Any], sorted_already: bool = False) -> tuple[PackedSequence, torch.Tensor]:
    sequences = [points for points, _ in samples]
    return pack_sequence(sequences, enforce_sorted=sorted_already), torch.tensor([y for _, y in samples])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Any) -> torch.Tensor:
        result: torch.Tensor = self.layer(torch.cat(x, 1) if isinstance(x, (tuple, list)) else x)
        return result


class Counting(Net):
    """A model that counts its calls, by which its output is multiplied, and that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.lock = 0, threading.Lock()

    def forward(self, x: Any) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = super().forward(x) / self.calls
        return result


class CountingLoss(Loss):
    """A sum of squares that counts its calls, by which it is multiplied."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, targets: Any) -> int:
        return len(targets)

    def total(self, output: Any, targets: Any) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = (output**2).sum() / self.calls
        return result


class Tagger(nn.Module):
    """Tags each token by itself and the mean of the real tokens, which needs the mask."""

    def __init__(self, uses_mask: bool = True) -> None:
        super().__init__()
        self.uses_mask = uses_mask
        self.embedding, self.head = nn.Embedding(TOKENS + 1, 6), nn.Linear(6, TOKENS)

    def forward(self, ids: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embedding(ids)
        mask = torch.ones_like(ids) if real is None or not self.uses_mask else real
        weights = mask[..., None].to(hidden.dtype)
        mean = (hidden * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        result: torch.Tensor = self.head(hidden + mean)
        return result


class Detector(nn.Module):
    """Gives one box an image; images keep their size."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, images: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.head(self.features(image[None]).relu().mean((2, 3)))[0] for image in images]


class OwnLoss(nn.Module):
    """Returns its loss by itself, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layer(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


class Asserting(OwnLoss):
    """Fails at a label out of range as a card does, whose kernels say nothing about it."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if int(labels.max()) >= CLASSES:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`")
        return super().forward(x, labels)


class BoxLoss(nn.Module):
    """Returns the mean over images of each one's squared errors."""

    def __init__(self) -> None:
        super().__init__()
        self.detector = Detector()

    def forward(self, image: list[torch.Tensor], boxes: list[torch.Tensor]) -> Any:
        found = zip(self.detector(image), boxes, strict=True)
        return {"loss": torch.stack([((box - wanted) ** 2).sum() for box, wanted in found]).mean()}


class GraphLoss(nn.Module):
    """Returns the mean over graphs of the cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GraphNet()

    def forward(self, graphs: Graphs) -> Any:
        return (nn.functional.cross_entropy(self.net(graphs), graphs.y),)


class ByBox(Loss):
    """Squared error of each image's box and all of its targets, a mean over the targets."""

    def count(self, targets: Any) -> int:
        return sum(len(of_image["boxes"]) for of_image in targets)

    def total(self, output: Any, targets: Any) -> torch.Tensor:
        errors = [((o - t["boxes"]) ** 2).sum() for o, t in zip(output, targets, strict=True)]
        return torch.stack(errors).sum()


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.node, self.head = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, graphs: Graphs) -> torch.Tensor:
        nodes = self.node(graphs.nodes).tanh()
        sums = nodes.new_zeros(len(graphs.y), 6).index_add(0, graphs.graph, nodes)
        result: torch.Tensor = self.head(sums)
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: PackedSequence) -> torch.Tensor:
        result: torch.Tensor = self.head(self.cells(x)[1][0])
        return result
