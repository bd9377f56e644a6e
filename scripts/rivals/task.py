"""What all three train: a small GPT on made-up tokens; `balance_bench/mixes.py` gives hetexp the same."""

from __future__ import annotations

import argparse

from hetexp.data.synthetic import Synthetic
from hetexp.model.gpt import GPT

MODEL = {"num_layers": 2, "num_heads": 2, "embedding_size": 64}
DATA = {"kind": "tokens", "num_samples": 4096, "num_test_samples": 0, "vocab_size": 32, "sequence_length": 16}
LEARNING_RATE = 0.002


def build_data() -> Synthetic:
    return Synthetic(**DATA)  # type: ignore[arg-type]


def build_model() -> GPT:
    return GPT(**MODEL, vocab_size=DATA["vocab_size"], sequence_length=DATA["sequence_length"])  # type: ignore[arg-type]


def arguments_of() -> argparse.Namespace:
    """Read what the benchmark asks of a loop."""
    parser = argparse.ArgumentParser()
    for name in ("--global-batch-size", "--steps", "--warm-steps"):
        parser.add_argument(name, type=int, required=True)
    return parser.parse_args()
