"""transformers' BERT classifies padded sentences; the model computes the loss."""

import torch
from common import BATCH, NUM_SAMPLES, Order, generator, main, pad
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification


def build():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return BertForSequenceClassification(config).double()


class Sentences(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        words = torch.randint(1, 64, (4 + index % 9,), generator=generator(index))
        return {"input_ids": words, "labels": words.sum() % 3}


def collate(samples):
    words = pad([sample["input_ids"] for sample in samples], 0)  # to the longest of these samples
    labels = torch.stack([sample["labels"] for sample in samples])
    return {"input_ids": words, "attention_mask": (words != 0).long(), "labels": labels}


def plain(epochs, report):
    model, data = build(), Sentences()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=collate)
    for _ in range(epochs):
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return model


def with_hetexp(epochs, report):
    import hetexp

    model, data = build(), Sentences()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = hetexp.setup(model, optimizer, data, global_batch_size=BATCH, collate=collate, log_every=1)
    for _ in range(run.epoch, epochs):
        for batch in run.batches():
            loss = run.model(**batch).loss
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    run.save()


def with_accelerate(epochs, report):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, data = build(), Sentences()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main(plain, with_hetexp, with_accelerate)
