"""Accelerate as its documentation has it: `prepare` and `accelerator.backward`.

Started by `scripts/bench_balancing.py` as `accelerate launch` would; the lines about `card` and `watch` are
the benchmark's.
"""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from rivals.emulation import EmulatedCard, Stopwatch
from rivals.task import LEARNING_RATE, arguments_of, build_data, build_model


def main() -> None:
    arguments = arguments_of()
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    train_data = build_data().train
    local_batch_size = arguments.global_batch_size // accelerator.num_processes
    loader = DataLoader(train_data, batch_size=local_batch_size, shuffle=True, drop_last=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    loss_function = torch.nn.CrossEntropyLoss()
    card = EmulatedCard(model, optimizer, train_data[:2][0])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    card.connect(model)
    watch = Stopwatch(card, arguments.warm_steps)

    model.train()
    step = 0
    while step < arguments.steps:
        for tokens, targets in loader:
            watch.step()
            optimizer.zero_grad()
            logits = model(tokens)
            loss = loss_function(logits.flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step == arguments.steps:
                break
    watch.tell()
    os._exit(0)  # as hetexp's ranks end: taking gloo's threads down can wait for ever


if __name__ == "__main__":
    main()
