"""A plain PyTorch loop on unequal devices: handwritten digits and a small network.

    python examples/plain_loop.py                                    one device
    hetexp launch examples/plain_loop.py hardware=nvidia_arc         an NVIDIA card beside an Intel one
    hetexp launch examples/plain_loop.py hardware=cpu -- --epochs 1  arguments of the script come after --

The four lines that make the difference are numbered.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

import hetexp


def test(model, batch):
    images, classes = batch
    output = model(images)
    return {
        "loss": nn.functional.cross_entropy(output, classes, reduction="sum"),
        "accuracy": (output.argmax(dim=1) == classes).sum(),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()

    images, classes = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(classes))
    training, testing = Subset(data, range(1437)), Subset(data, range(1437, 1797))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_function = nn.CrossEntropyLoss()

    run = hetexp.setup(  # 1
        model, optimizer, training, global_batch_size=options.batch_size, eval_dataset=testing
    )
    for epoch in range(run.epoch, options.epochs):
        for inputs, targets in run.batches():  # 2
            loss = loss_function(run.model(inputs), targets)  # 3
            run.backward(loss)  # 4
            optimizer.step()
            optimizer.zero_grad()
        result = run.evaluate(lambda batch: test(run.model, batch))
        run.print(f"epoch {epoch}: test loss {result['loss']:.4f}, accuracy {result['accuracy']:.4f}")
    run.save()


if __name__ == "__main__":
    main()
