"""Models that return their loss by themselves, of Hugging Face and of a person's own, and data for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from hetexp.training.loss import Loss

SAMPLES = 42
"""Two batches of 16 and a tail of 10."""


class Samples(Dataset[Any]):
    """Samples `(inputs, targets)`, whose inputs hold the labels."""

    def __init__(self, inputs: dict[str, torch.Tensor], targets: Any) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        inputs = {name: value[index] for name, value in self.inputs.items()}
        if isinstance(self.targets, dict):
            return inputs, {name: value[index] for name, value in self.targets.items()}
        return inputs, self.targets[index]


class Split:
    """The same samples to train and to evaluate on."""

    def __init__(self, samples: Samples) -> None:
        self.train = self.evaluation = samples


def tokens() -> Split:
    """Return sequences of which between none and all tokens have a label."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(11, (SAMPLES, 6), generator=generator)
    labels = words.clone()
    labels[torch.rand(SAMPLES, 6, generator=generator) > torch.rand(SAMPLES, 1, generator=generator)] = -100
    labels[torch.rand(SAMPLES, generator=generator) < 0.6] = -100  # so many that whole parts have none
    return Split(Samples({"input_ids": words, "labels": labels}, labels))


def texts() -> Split:
    """Return sequences, each of a class."""
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(11, (SAMPLES, 6), generator=generator)
    labels = words[:, 0] % 3
    return Split(Samples({"input_ids": words, "labels": labels}, labels))


def numbers() -> Split:
    """Return vectors with a class, a box, and words of which few count."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    words = torch.randint(4, (SAMPLES, 3), generator=generator)
    words[torch.rand(SAMPLES, 3, generator=generator) < 0.6] = -100
    targets = {"kind": x[:, :3].argmax(1), "box": x[:, :2] * 2, "words": words}
    return Split(Samples({"x": x, **targets}, targets))


def _seeded(seed: int = 5) -> None:
    torch.manual_seed(seed)


def gpt2(exact: bool = True) -> nn.Module:
    """Return a tiny GPT-2; `exact`: its loss is not rounded to float32, as Hugging Face's own is."""
    from transformers import GPT2Config, GPT2LMHeadModel

    _seeded()
    config = GPT2Config(
        vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    if exact:
        model.loss_function = _shifted
    built: nn.Module = model
    return built


def _shifted(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    _seeded()
    config = BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.num_labels, config.max_position_embeddings = 3, 6
    model: nn.Module = BertForSequenceClassification(config)
    return model


class Bare(nn.Module):
    """Returns the mean over the words that count and nothing else, `0 / 0` if none does."""

    def __init__(self) -> None:
        super().__init__()
        _seeded()
        self.layer = nn.Linear(5, 12)

    def forward(self, x: torch.Tensor, words: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        logits = self.layer(x).view(-1, 3, 4).movedim(2, 1)
        each = functional.cross_entropy(logits, words, reduction="none")
        return (each.sum() / (words != -100).sum(),)


class Detector(nn.Module):
    """Returns a dict of losses in training, and what it has found in evaluation, as torchvision's do."""

    def __init__(self) -> None:
        super().__init__()
        _seeded()
        self.kind, self.box = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, kind: torch.Tensor, box: torch.Tensor, **_: Any) -> Any:
        if not self.training:
            return [{"boxes": row} for row in self.box(x)]
        losses = {"loss_classifier": functional.cross_entropy(self.kind(x), kind)}
        return losses | {"loss_box_reg": functional.mse_loss(self.box(x), box)}


class Heads(nn.Module):
    """Three outputs, for a sum of losses."""

    def __init__(self) -> None:
        super().__init__()
        _seeded()
        self.body = nn.Linear(5, 8)
        self.kind, self.box, self.words = nn.Linear(8, 3), nn.Linear(8, 2), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        hidden = self.body(x).tanh()
        words = self.words(hidden).view(-1, 4, 3)
        return {"kind": self.kind(hidden), "box": self.box(hidden), "words": words}


def count_words(targets: dict[str, torch.Tensor]) -> int:
    return int((targets["words"] != -100).sum())


class Contrastive(Loss):
    """Each output is to be nearest to its own input: the others of the batch are what it is not."""

    def count(self, targets: Any) -> int:
        return len(targets)

    def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(output), device=output.device)
        width = min(output.shape[1], targets.shape[1])
        return functional.cross_entropy(output[:, :width] @ targets[:, :width].T, places, reduction="sum")


class MeanOfMeans(Loss):
    """No sum: a mean whose count is 1."""

    def count(self, targets: Any) -> int:
        return 1

    def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, targets)


class Centred(nn.Module):
    """Takes the batch's mean away from each sample."""

    def __init__(self, in_features: int = 8, num_classes: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x - x.mean(0))
        return output


class Vectors(Dataset[Any]):
    """Samples of vectors and what is to be learnt of them, 35 of them."""

    def __init__(self, classes: bool = False) -> None:
        self.x = torch.randn(35, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        self.y = self.x[:, :3].argmax(1) if classes else self.x[:, :3].clone()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def normed() -> nn.Module:
    """Return a model that couples samples by BatchNorm alone, and draws random numbers in dropout."""
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
