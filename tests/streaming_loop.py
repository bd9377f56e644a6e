"""A person's own training loop over streams, as `hetexp launch` runs it: FOLDER WORKERS."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from streaming import Rows
from torch import nn
from torch.nn import functional

import hetexp


def main(folder: Path, workers: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = hetexp.setup(
        model,
        optimizer,
        Rows(77),
        eval_dataset=Rows(41, first=1000),
        global_batch_size=32,
        num_workers=workers,
        log_every=1,
        run_dir=folder / "alone",
    )
    losses, epochs = [], []
    for epoch in range(3):
        for inputs, labels in run.batches():
            loss = functional.cross_entropy(run.model(inputs), labels)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(run.log(loss=loss.detach())["loss"])
            if epoch == 1 and len(losses) == 4:
                break  # the next loop goes on in this epoch
        epochs.append(run.epoch)
    sums = run.evaluate(
        lambda batch: {"loss": functional.cross_entropy(run.model(batch[0]), batch[1], reduction="sum")}
    )
    if run.is_main:
        state = {"weight": model.weight.detach(), "losses": losses, "epochs": epochs, "evaluation": sums}
        torch.save(state, folder / "state.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
