"""transformers' GPT-2 with its own loss, a mean over the tokens that follow another one.

transformers computes this loss in float32, whatever the model's type. For a comparison in float64 the model
gets the same loss in float64, by `loss_function`, transformers' own way to give one. The environment variable
ZOO_FLOAT32_LOSS=1 leaves it as it is.
"""

import os

import torch
from common import BATCH, IGNORED, NUM_SAMPLES, Order, generator, main, pad
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

WORDS = 48


def causal_loss(logits, labels, vocab_size, **_):
    rows, words = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(rows, words, ignore_index=IGNORED)


def build():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).double()
    if not os.environ.get("ZOO_FLOAT32_LOSS"):
        model.loss_function = causal_loss
    return model


class Texts(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.randint(1, WORDS, (4 + index % 11,), generator=generator(index))


def collate(texts):
    words = pad(texts, 0)
    mask = (words != 0).long()
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, IGNORED)}


def plain(epochs, report):
    model, data = build(), Texts()
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

    model, data = build(), Texts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = hetexp.setup(model, optimizer, data, global_batch_size=BATCH, collate=collate, log_every=1)
    for _ in range(run.epoch, epochs):
        for batch in run.batches():
            loss = run.model(**batch).loss
            run.backward(loss, count=(batch["labels"][:, 1:] != IGNORED).sum())
            optimizer.step()
            optimizer.zero_grad()
    run.save()


def with_accelerate(epochs, report):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, data = build(), Texts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for batch in loader:
            loss = model(**batch).loss
            tokens = (batch["labels"][:, 1:] != IGNORED).sum()
            scale = accelerator.num_processes * tokens / accelerator.reduce(tokens)
            accelerator.backward(loss * scale)
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main(plain, with_hetexp, with_accelerate)
