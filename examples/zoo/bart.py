"""transformers' BART, an encoder-decoder: padded on both sides, its own loss over the target's words."""

import torch
from common import BATCH, IGNORED, NUM_SAMPLES, Order, generator, main, pad
from torch.utils.data import DataLoader, Dataset
from transformers import BartConfig, BartForConditionalGeneration

WORDS = 48


def build():
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=WORDS,
        max_position_embeddings=32,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        forced_eos_token_id=1,
    )
    return BartForConditionalGeneration(config).double()


class Pairs(Dataset):
    """A text and its words in the opposite order, every second one."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        words = torch.randint(2, WORDS, (4 + index % 11,), generator=generator(index))
        return words, words.flip(0)[::2]


def collate(samples):
    texts, answers = zip(*samples, strict=True)
    words = pad(texts, 0)
    return {"input_ids": words, "attention_mask": (words != 0).long(), "labels": pad(answers, IGNORED)}


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
