"""What `bench_ddp.py`, `bench_scaling.py` and `bench_exposed.py` train: the shipped GPT on made-up tokens."""

from __future__ import annotations

from dataclasses import dataclass

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

    def model(self) -> dict[str, int | bool]:
        """Return what `hetexp.model.gpt.GPT` takes, what the data decides left out."""
        return {
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "embedding_size": self.embedding_size,
            "tie_weights": True,
        }

    def num_parameters(self) -> int:
        """Return the weights of the model, tied ones once."""
        width = self.embedding_size
        block = 12 * width * width + 13 * width
        return (self.vocab_size + self.sequence_length) * width + self.num_layers * block + 2 * width


GPT_124M = Size(12, 12, 768, 50304, 1024)
"""GPT-2's smallest, 124.5 million weights; a vocabulary that is a multiple of 64, as nanoGPT has it."""
TINY = Size(2, 2, 32, 64, 16)
"""To see whether a script works, on any CPU."""
LEARNING_RATE = 6e-4


def num_samples(global_batch_size: int, steps: int) -> int:
    """Return the size of the data set: whole global batches, so that no step is smaller than the others."""
    return global_batch_size * max(1, min(steps, MOST_SAMPLES // global_batch_size))


def data_of(size: Size, global_batch_size: int, steps: int) -> dict[str, int | str]:
    """Return what `hetexp.data.synthetic.Synthetic` takes."""
    return {
        "kind": "tokens",
        "num_samples": num_samples(global_batch_size, steps),
        "num_test_samples": 0,
        "vocab_size": size.vocab_size,
        "sequence_length": size.sequence_length,
    }


def words_of(size: Size, global_batch_size: int, steps: int, precision: str) -> list[str]:
    """Return the overrides of a run of hetexp that only trains: nothing measured, evaluated or saved."""
    return [
        "model=gpt",
        *(f"model.{key}={str(value).lower()}" for key, value in size.model().items()),
        "data=synthetic",
        *(f"data.{key}={value}" for key, value in data_of(size, global_batch_size, steps).items()),
        "optimizer=adamw",
        f"optimizer.lr={LEARNING_RATE}",
        f"trainer.precision={precision}",
        f"trainer.global_batch_size={global_batch_size}",
        f"trainer.fast_dev_run={steps}",  # no checkpoint
        *QUIET,
    ]


QUIET = ["logger=none", "diagram=false", "hardware.check_memory=false"]
