"""A loss of your own over masked tokens, accumulated over microbatches and clipped.

    python examples/custom_loss.py
    hetexp launch examples/custom_loss.py hardware=nvidia_arc

The mean is taken over what counts, here the tokens with a label. Devices have different numbers of them, so
each says how many its loss is the mean of (`count=`), and the gradient is that of the mean over all of them.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import Dataset

import hetexp

WORDS, LENGTH, NO_LABEL = 32, 8, -100


class Echo(Dataset):
    """Sequences in which some tokens must be named again one place later; between 1 and all of them."""

    def __init__(self, num_samples):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(WORDS, (num_samples, LENGTH), generator=generator)
        self.labels = self.tokens.roll(1, dims=1)
        lengths = torch.randint(1, LENGTH, (num_samples, 1), generator=generator)
        self.labels[(torch.arange(LENGTH) > lengths) | (torch.arange(LENGTH) == 0)] = NO_LABEL

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


class Net(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, WORDS)

    def forward(self, tokens):
        return self.out(self.mix(self.embed(tokens))[0])


def focal_loss(output, labels):
    """Return the mean over the tokens with a label, the surer ones counting less, and their number."""
    kept = labels != NO_LABEL
    chance = output[kept].log_softmax(dim=-1).gather(1, labels[kept].unsqueeze(1)).squeeze(1)
    return -((1 - chance.exp()) ** 2 * chance).mean(), kept.sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = hetexp.setup(model, optimizer, Echo(1024), global_batch_size=64, accumulate=2)
    while run.step < options.steps:
        for batch in run.batches():
            loss, count = focal_loss(run.model(batch["tokens"]), batch["labels"])
            run.backward(loss, count=count)
            if run.step_due:  # the step's last microbatch: the gradient is that of the whole batch
                run.clip_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()
                if run.step % 20 == 0:
                    run.print(f"step {run.step}: loss {run.log(focal=loss)['focal']:.4f}")
            if run.step == options.steps:
                break


if __name__ == "__main__":
    main()
