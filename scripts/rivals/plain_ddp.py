"""DistributedDataParallel as torch's tutorial has it: the same local batch on every device.

Started by `scripts/bench_balancing.py` as torchrun would; the lines about `card` and `watch` are the
benchmark's.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from rivals.emulation import EmulatedCard, Stopwatch
from rivals.task import LEARNING_RATE, arguments_of, build_data, build_model


def main() -> None:
    arguments = arguments_of()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_data = build_data().train
    sampler: DistributedSampler[object] = DistributedSampler(train_data, seed=0)
    loader = DataLoader(
        train_data,
        batch_size=arguments.global_batch_size // dist.get_world_size(),
        sampler=sampler,
        drop_last=True,
    )
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    loss_function = torch.nn.CrossEntropyLoss()
    card = EmulatedCard(model, optimizer, train_data[:2][0])
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    card.connect(ddp)
    watch = Stopwatch(card, arguments.warm_steps)

    ddp.train()
    step, epoch = 0, 0
    while step < arguments.steps:
        sampler.set_epoch(epoch)
        for tokens, targets in loader:
            watch.step()
            optimizer.zero_grad(set_to_none=True)
            logits = ddp(tokens)
            loss = loss_function(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            step += 1
            if step == arguments.steps:
                break
        epoch += 1
    watch.tell()
    os._exit(0)  # as hetexp's ranks end: taking gloo's threads down can wait for ever


if __name__ == "__main__":
    main()
