"""torchvision's DeepLabV3 names each pixel; some have no label, and an auxiliary head has a loss, too."""

import torch
from common import BATCH, NUM_SAMPLES, Order, generator, main
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

UNLABELLED = 255


class Hardswish(nn.Module):
    """On a card torch multiplies by a sixth that is rounded to float32; on a processor it divides by 6."""

    def forward(self, x):
        return x * (x + 3).clamp(0, 6) / 6


class Hardsigmoid(nn.Module):
    def forward(self, x):
        return (x + 3).clamp(0, 6) / 6


EXACT = {nn.Hardswish: Hardswish, nn.Hardsigmoid: Hardsigmoid}


def build():
    torch.manual_seed(0)
    model = deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=5, aux_loss=True
    ).double()
    for layer in list(model.modules()):
        for name, child in layer.named_children():
            if isinstance(child, nn.Dropout):
                child.p = 0.0  # its numbers would differ from device to device
            elif type(child) in EXACT:
                setattr(layer, name, EXACT[type(child)]())
    return model


class Scenes(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        draw = generator(index)
        image = torch.randn(3, 64, 64, generator=draw, dtype=torch.float64)
        labels = torch.randint(5, (64, 64), generator=draw)
        labels[: 1 + index % 31] = UNLABELLED  # of each image another part
        return image, labels


def segmentation_loss(output, labels):
    """Return the mean over the labelled pixels, as torchvision's reference scripts compute it."""
    losses = {
        name: nn.functional.cross_entropy(head, labels, ignore_index=UNLABELLED)
        for name, head in output.items()
    }
    return losses["out"] + 0.5 * losses["aux"]


def plain(epochs, report):
    model, data = build(), Scenes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data, batch_sampler=Order(data))
    for _ in range(epochs):
        for images, labels in loader:
            loss = segmentation_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return model


def with_hetexp(epochs, report):
    import hetexp

    model, data = build(), Scenes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = hetexp.setup(model, optimizer, data, global_batch_size=BATCH, log_every=1)
    for _ in range(run.epoch, epochs):
        for images, labels in run.batches():
            loss = segmentation_loss(run.model(images), labels)
            run.backward(loss, count=(labels != UNLABELLED).sum())
            optimizer.step()
            optimizer.zero_grad()
    run.save()


def with_accelerate(epochs, report):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, data = build(), Scenes()
    if accelerator.num_processes > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data, batch_sampler=Order(data))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for images, labels in loader:
            loss = segmentation_loss(model(images), labels)
            pixels = (labels != UNLABELLED).sum()
            scale = accelerator.num_processes * pixels / accelerator.reduce(pixels)
            accelerator.backward(loss * scale)
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main(plain, with_hetexp, with_accelerate)
