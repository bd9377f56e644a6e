"""timm's EfficientNet in its smallest version; its BatchNorm layers are timm's own, with activation."""

import timm
import torch
from common import BATCH, Order, main
from resnet import Images
from torch import nn
from torch.utils.data import DataLoader


def build():
    torch.manual_seed(0)
    return timm.create_model("test_efficientnet", num_classes=4).double()


def plain(epochs, report):
    model, data = build(), Images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data, batch_sampler=Order(data))
    loss_function = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for images, classes in loader:
            loss = loss_function(model(images), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return model


def with_hetexp(epochs, report):
    import hetexp

    model, data = build(), Images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = hetexp.setup(model, optimizer, data, global_batch_size=BATCH, log_every=1)
    loss_function = nn.CrossEntropyLoss()
    for _ in range(run.epoch, epochs):
        for images, classes in run.batches():
            loss = loss_function(run.model(images), classes)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    run.save()


def with_accelerate(epochs, report):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, data = build(), Images()
    if accelerator.num_processes > 1:
        model = timm.layers.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data, batch_sampler=Order(data))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss_function = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for images, classes in loader:
            loss = loss_function(model(images), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main(plain, with_hetexp, with_accelerate)
