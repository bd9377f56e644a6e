"""What the scripts of the zoo share: the sizes, the order of samples, and how one of them is started.

python bert.py                        the plain script: torch and the model's own library
python bert.py accelerate             the same with Accelerate, in one process
hetexp launch bert.py -- hetexp       the same with hetexp, on the devices of this machine
"""

import argparse
import json

import torch
from torch.utils.data import Sampler

from hetexp.data.sampler import GlobalSampler, Position

BATCH = 8
NUM_SAMPLES = 38  # the last batch of an epoch is short: 6 samples
EPOCHS = 4  # of 5 steps each
IGNORED = -100  # label of a token that does not count, as in torch and transformers


class Order(Sampler):
    """Batches in the order in which hetexp draws samples, for a comparison; else `shuffle=True` would do."""

    reverses = False
    """Whether each batch has its samples in the opposite order, which changes rounding only."""

    def __init__(self, dataset):
        self.sampler, self.next = GlobalSampler(len(dataset), BATCH, seed=0), Position()
        self.batch_size = BATCH

    def __len__(self):
        return self.sampler.steps_per_epoch

    def __iter__(self):
        for _ in range(len(self)):
            indices, self.next = self.sampler.batch(self.next)
            yield indices.tolist()[:: -1 if self.reverses else 1]


def generator(index):
    """Return a generator of its own for a sample, so that no other sample changes its numbers."""
    return torch.Generator().manual_seed(1000 + index)


def pad(sequences, value):
    """Stack sequences [length] of unequal length: [batch, longest]."""
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)


def main(plain, with_hetexp, with_accelerate):
    """Run one of a script's loops, each of which gets a function for its losses and returns the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", nargs="?", default="plain", choices=("plain", "hetexp", "accelerate"))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    losses = []

    def report(loss):
        losses.append(loss.item())

    loop = {"plain": plain, "hetexp": with_hetexp, "accelerate": with_accelerate}[options.way]
    loop(options.epochs, report)
    if options.way == "hetexp":
        return  # `hetexp launch` logs the losses
    print(json.dumps({"first": losses[0], "last": losses[-1]}))
