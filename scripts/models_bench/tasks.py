"""Models of other people's libraries, and hetexp's own, with made-up data in memory and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ddp_bench import task as own
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from hetexp.data.synthetic import Synthetic
from hetexp.model.convnet import ConvNet
from hetexp.model.gpt import GPT

HELD = 256
"""Samples in memory, which a longer data set repeats."""
Batch = Any


class Repeated(Dataset[Any]):
    """A data set as most people's own: one sample at a time, out of memory."""

    def __init__(self, samples: Any, num_samples: int) -> None:
        self.samples, self.num_samples = samples, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


def images(tiny: bool, num_samples: int) -> Repeated:
    side = 64 if tiny else 224
    held = torch.randn(HELD, 3, side, side, generator=_generator())
    return Repeated([(image, index % 8) for index, image in enumerate(held)], num_samples)


def sentences(tiny: bool, num_samples: int) -> Repeated:
    """Sentences of 16 to 128 words, of two classes."""
    longest, generator = (16 if tiny else 128), _generator()
    lengths = torch.randint(longest // 8, longest + 1, (HELD,), generator=generator).tolist()
    words = [torch.randint(1, 64, (length,), generator=generator) for length in lengths]
    labelled = [{"input_ids": row, "labels": index % 2} for index, row in enumerate(words)]
    return Repeated(labelled, num_samples)


def texts(tiny: bool, num_samples: int) -> Repeated:
    words = torch.randint(64, (HELD, 16 if tiny else 1024), generator=_generator())
    return Repeated([{"input_ids": row, "labels": row} for row in words], num_samples)


def noisy(tiny: bool, num_samples: int) -> Repeated:
    side, generator = (16 if tiny else 64), _generator()
    pairs = torch.randn(HELD, 2, 3, side, side, generator=generator)
    times = torch.randint(1000, (HELD,), generator=generator)
    parts = zip(pairs, times, strict=True)
    return Repeated([{"sample": p[0], "noise": p[1], "timestep": time} for p, time in parts], num_samples)


def padded(samples: list[Any]) -> Batch:
    """Collate sentences, padded to the longest of them."""
    rows = [sample["input_ids"] for sample in samples]
    words = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": words, "attention_mask": (words != 0).long(), "labels": labels}


def from_timm(name: str, tiny: bool, **small: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, num_classes=8 if tiny else 1000, **(small if tiny else {}))
    return model


def bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model: nn.Module = BertForSequenceClassification(BertConfig(**(sizes if tiny else {}), num_labels=2))
    return model


def gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**(sizes | ends if tiny else {}), use_cache=False))
    return model


def unet(tiny: bool) -> nn.Module:
    from diffusers import UNet2DModel

    widths = (16, 32) if tiny else (128, 256, 384, 512)
    down = ("DownBlock2D",) * (len(widths) - 1) + ("AttnDownBlock2D",)
    up = ("AttnUpBlock2D",) + ("UpBlock2D",) * (len(widths) - 1)
    groups = 8 if tiny else 32
    model: nn.Module = UNet2DModel(
        sample_size=16 if tiny else 64,
        block_out_channels=widths,
        down_block_types=down,
        up_block_types=up,
        norm_num_groups=groups,
    )
    return model


def class_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, classes = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), classes.flatten())


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def noise_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.mse_loss(model(batch["sample"], batch["timestep"]).sample, batch["noise"])


@dataclass(frozen=True)
class Task:
    """A model with its data."""

    title: str
    build: Callable[[bool], nn.Module]
    """Makes the model; a tiny one if the argument is true."""
    data: Callable[[bool, int], Repeated]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    batch: int
    """Samples of a step on each device."""
    words: tuple[str, ...]
    """Overrides by which hetexp computes the same loss without a script."""
    collate: Callable[[list[Any]], Batch] | None = None
    sync_batch_norm: bool = False


def _timm(title: str, name: str, sync_batch_norm: bool = False, **small: Any) -> Task:
    def build(tiny: bool) -> nn.Module:
        return from_timm(name, tiny, **small)

    words = ("trainer.loss=cross_entropy",)
    return Task(title, build, images, class_loss, 128, words, sync_batch_norm=sync_batch_norm)


def _own(title: str, kind: type[nn.Module], name: str, batch: int) -> Task:
    def source(tiny: bool, num_samples: int) -> Synthetic:
        held = own.data_of(own.TASKS[name][tiny], 1, min(num_samples, own.MOST_SAMPLES))
        return Synthetic(**held)  # type: ignore[arg-type]

    def data(tiny: bool, num_samples: int) -> Repeated:
        return Repeated(source(tiny, num_samples).train, num_samples)

    def build(tiny: bool) -> nn.Module:
        return kind(**own.TASKS[name][tiny].model(), **source(tiny, 1).facts)

    return Task(title, build, data, class_loss, batch, ("trainer.loss=cross_entropy",))


_RESNET: dict[str, Any] = {"channels": (16, 32, 64, 128)}
_VIT: dict[str, Any] = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3}
_OWN, _COLLATE = "trainer.loss=model", "+data.collate=models_bench.tasks.padded"
_LABELS = "loss.count=shifted_labels"
_NOISE = ("trainer.loss=mse", "loss.output=sample", "+data.inputs=[sample,timestep]", "+data.targets=noise")
TASKS = {
    "resnet50": _timm("timm ResNet-50", "resnet50", **_RESNET),
    "resnet50_sync": _timm("timm ResNet-50, synchronised BatchNorm", "resnet50", True, **_RESNET),
    "convnext": _timm("timm ConvNeXt-T", "convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 16, 32, 64)),
    "vit": _timm("timm ViT-S", "vit_small_patch16_224", **_VIT),
    "bert": Task("BERT-base, padded", bert, sentences, own_loss, 64, (_OWN, _COLLATE), padded),
    "gpt2": Task("GPT-2 124M, own loss", gpt2, texts, own_loss, 16, (_OWN, _LABELS)),
    "unet": Task("diffusers U-Net", unet, noisy, noise_loss, 32, _NOISE),
    "gpt": _own("hetexp's GPT 124M", GPT, "gpt", 16),
    "convnet": _own("hetexp's conv net", ConvNet, "convnet", 512),
}


def model_of(name: str, tiny: bool) -> nn.Module:
    """Return a task's model, always with the same weights."""
    torch.manual_seed(0)
    return TASKS[name].build(tiny)


def data_of(name: str, tiny: bool, num_samples: int) -> Repeated:
    """Return a task's data."""
    return TASKS[name].data(tiny, num_samples)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
