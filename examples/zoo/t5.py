"""transformers' T5, an encoder-decoder with relative positions; its own loss over the target's words.

Its normalisation computes in float32, whatever the model's type: results agree to float32's digits only.
"""

import torch
from bart import WORDS, Pairs, collate
from common import BATCH, IGNORED, Order, main
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration


def build():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).double()


def plain(epochs, report):
    model, data = build(), Pairs()
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

    model, data = build(), Pairs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = hetexp.setup(model, optimizer, data, global_batch_size=BATCH, collate=collate, log_every=1)
    for _ in range(run.epoch, epochs):
        for batch in run.batches():
            loss = run.model(**batch).loss
            run.backward(loss, count=(batch["labels"] != IGNORED).sum())
            optimizer.step()
            optimizer.zero_grad()
    run.save()


def with_accelerate(epochs, report):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, data = build(), Pairs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for batch in loader:
            loss = model(**batch).loss
            tokens = (batch["labels"] != IGNORED).sum()
            scale = accelerator.num_processes * tokens / accelerator.reduce(tokens)
            accelerator.backward(loss * scale)
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main(plain, with_hetexp, with_accelerate)
