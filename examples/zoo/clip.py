"""transformers' CLIP: each image is compared with all texts of the batch, each text with all images.

The loss is no sum over samples: it needs the embeddings of the whole batch. `run.gather` brings them from all
devices.
"""

import torch
from common import BATCH, NUM_SAMPLES, Order, generator, main, pad
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPConfig, CLIPModel


def build():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={**size, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 63},
        vision_config={**size, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    return CLIPModel(config).double()


class Captioned(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        draw = generator(index)
        image = torch.rand(3, 32, 32, generator=draw, dtype=torch.float64)
        words = torch.randint(2, 63, (3 + index % 8,), generator=draw)
        return image, torch.cat([words, torch.tensor([63])])  # 63: end of text


def collate(samples):
    images, texts = zip(*samples, strict=True)
    words = pad(texts, 0)
    return {
        "pixel_values": torch.stack(images),
        "input_ids": words,
        "attention_mask": (words != 0).long(),
    }


def contrastive_loss(images, texts, scale):
    """Return CLIP's loss of embeddings [batch, width] whose rows belong together."""
    scores = texts @ images.T * scale.exp()
    own = torch.arange(len(scores), device=scores.device)
    return (nn.functional.cross_entropy(scores, own) + nn.functional.cross_entropy(scores.T, own)) / 2


def plain(epochs, report):
    model, data = build(), Captioned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=collate)
    for _ in range(epochs):
        for batch in loader:
            out = model(**batch)
            loss = contrastive_loss(out.image_embeds, out.text_embeds, model.logit_scale)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return model


def with_hetexp(epochs, report):
    import hetexp

    model, data = build(), Captioned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    run = hetexp.setup(model, optimizer, data, global_batch_size=BATCH, collate=collate, log_every=1)
    for _ in range(run.epoch, epochs):
        for batch in run.batches():
            out = run.model(**batch)
            images, texts = run.gather(out.image_embeds), run.gather(out.text_embeds)
            loss = contrastive_loss(images, texts, run.model.logit_scale)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    run.save()


def with_accelerate(epochs, report):
    from accelerate import Accelerator
    from torch.distributed.nn.functional import all_gather  # Accelerate's own gather has no gradient

    accelerator = Accelerator()
    model, data = build(), Captioned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for batch in loader:
            out = model(**batch)
            images, texts = out.image_embeds, out.text_embeds
            if accelerator.num_processes > 1:  # every process must have equally many samples
                images, texts = torch.cat(all_gather(images)), torch.cat(all_gather(texts))
            scale = accelerator.unwrap_model(model).logit_scale
            loss = contrastive_loss(images, texts, scale)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main(plain, with_hetexp, with_accelerate)
