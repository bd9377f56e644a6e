"""What the benchmarks of `ddp` train: the GPT on made-up tokens, or the conv net on made-up images."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

Value = int | bool | str | list[int]


MOST_SAMPLES = 8192
"""Of the data set: more steps go through it again."""


@dataclass(frozen=True)
class Size:
    """A GPT whose output layer is its token embedding, and the data that it reads."""

    num_layers: int
    num_heads: int
    embedding_size: int
    vocab_size: int
    sequence_length: int
    model_name = "gpt"

    @property
    def tokens_per_sample(self) -> int:
        return self.sequence_length

    def model(self) -> dict[str, Value]:
        """Return the model's own arguments, without those that the data decides."""
        return {
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "embedding_size": self.embedding_size,
            "tie_weights": True,
        }

    def data(self) -> dict[str, Value]:
        """Return what `hetexp.data.synthetic.Synthetic` takes, but for the number of samples."""
        return {
            "kind": "tokens",
            "vocab_size": self.vocab_size,
            "sequence_length": self.sequence_length,
        }

    def sample(self) -> str:
        """Return what a sample is, for a table's title."""
        return f"sequence {self.sequence_length:,}"

    def num_parameters(self) -> int:
        width = self.embedding_size
        block = 12 * width * width + 13 * width
        return (self.vocab_size + self.sequence_length) * width + self.num_layers * block + 2 * width


@dataclass(frozen=True)
class Images:
    """A conv net, and the images that it tells apart."""

    widths: tuple[int, ...]
    blocks_per_width: int
    side: int
    num_classes: int
    model_name = "convnet"
    tokens_per_sample = 1

    def model(self) -> dict[str, Value]:
        return {"widths": list(self.widths), "blocks_per_width": self.blocks_per_width}

    def data(self) -> dict[str, Value]:
        shape = [3, self.side, self.side]
        return {"kind": "classification", "input_shape": shape, "num_classes": self.num_classes}

    def sample(self) -> str:
        return f"images of 3 × {self.side} × {self.side}"

    def num_parameters(self) -> int:
        import torch

        from hetexp.model.convnet import ConvNet

        shapes: dict[str, Any] = {"input_shape": (3, self.side, self.side), "num_classes": self.num_classes}
        with torch.device("meta"):
            model = ConvNet(self.widths, self.blocks_per_width, **shapes)
        return sum(parameter.numel() for parameter in model.parameters())


Task: TypeAlias = Size | Images
GPT_124M = Size(12, 12, 768, 50304, 1024)
"""GPT-2's smallest, 124.5 million weights; a vocabulary that is a multiple of 64, as nanoGPT has it."""
TINY = Size(2, 2, 32, 64, 16)
"""To see whether a script works, on any CPU."""
CONVNET = Images((64, 128, 256, 512), 2, 64, 100)
"""As wide and deep as ResNet-18, for images of an eighth of ImageNet's area."""
TINY_CONVNET = Images((8, 16), 1, 8, 4)
TASKS: dict[str, tuple[Task, Task]] = {"gpt": (GPT_124M, TINY), "convnet": (CONVNET, TINY_CONVNET)}
"""By the name of the model: the one that is measured, and a tiny one."""
LEARNING_RATE = 6e-4


def num_samples(global_batch_size: int, steps: int) -> int:
    """Return the size of the data set: whole global batches, so that no step is smaller than the others."""
    return global_batch_size * max(1, min(steps, MOST_SAMPLES // global_batch_size))


def data_of(task: Task, global_batch_size: int, steps: int) -> dict[str, Value]:
    """Return what `hetexp.data.synthetic.Synthetic` takes."""
    return {**task.data(), "num_samples": num_samples(global_batch_size, steps), "num_test_samples": 0}


def words_of(task: Task, global_batch_size: int, steps: int, precision: str) -> list[str]:
    """Return the overrides of a run of hetexp that only trains: nothing measured, evaluated or saved."""
    return [
        f"model={task.model_name}",
        *(f"model.{key}={word(value)}" for key, value in task.model().items()),
        "data=synthetic",
        *(f"data.{key}={word(value)}" for key, value in data_of(task, global_batch_size, steps).items()),
        "optimizer=adamw",
        f"optimizer.lr={LEARNING_RATE}",
        f"trainer.precision={precision}",
        f"trainer.global_batch_size={global_batch_size}",
        f"trainer.fast_dev_run={steps}",  # no checkpoint
        *QUIET,
    ]


def word(value: Value) -> str:
    """Return a value as an override has it."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


QUIET = ["logger=none", "diagram=false", "hardware.check_memory=false"]
