"""An LSTM over packed sequences names each word; sentences differ in length."""

import torch
from common import BATCH, IGNORED, NUM_SAMPLES, Order, generator, main, pad
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 5)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(
            self.embed(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(states)


def build():
    torch.manual_seed(0)
    return Tagger().double()


class Tagged(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        words = torch.randint(64, (3 + index % 9,), generator=generator(index))
        return words, words % 5


def collate(samples):
    words, tags = zip(*samples, strict=True)
    lengths = torch.tensor([len(sentence) for sentence in words])
    return {"words": pad(words, 0), "lengths": lengths, "tags": pad(tags, IGNORED)}


def plain(epochs, report):
    model, data = build(), Tagged()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=collate)
    loss_function = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for batch in loader:
            scores = model(batch["words"], batch["lengths"])
            loss = loss_function(scores.flatten(0, 1), batch["tags"].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return model


def with_hetexp(epochs, report):
    import hetexp

    model, data = build(), Tagged()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = hetexp.setup(model, optimizer, data, global_batch_size=BATCH, collate=collate, log_every=1)
    loss_function = nn.CrossEntropyLoss()
    for _ in range(run.epoch, epochs):
        for batch in run.batches():
            scores = run.model(batch["words"], batch["lengths"])
            loss = loss_function(scores.flatten(0, 1), batch["tags"].flatten())
            run.backward(loss, count=batch["lengths"].sum())
            optimizer.step()
            optimizer.zero_grad()
    run.save()


def with_accelerate(epochs, report):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, data = build(), Tagged()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss_function = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for batch in loader:
            scores = model(batch["words"], batch["lengths"])
            loss = loss_function(scores.flatten(0, 1), batch["tags"].flatten())
            tokens = batch["lengths"].sum()
            scale = accelerator.num_processes * tokens / accelerator.reduce(tokens)
            accelerator.backward(loss * scale)
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main(plain, with_hetexp, with_accelerate)
