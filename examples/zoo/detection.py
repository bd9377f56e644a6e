"""torchvision's Faster R-CNN: lists of images of any size and of dicts; the model returns a dict of losses.

Its losses are means over anchors and proposals that are drawn from the images. Here all are taken, equally
many of each image: so a mean over them is a mean over images, and no numbers are drawn. The environment
variable ZOO_DRAWS=1 gives torchvision's own settings, which draw.
"""

import os

import torch
from common import BATCH, NUM_SAMPLES, Order, generator, main
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import mobilenet_backbone
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead

ALL_TAKEN = {
    "rpn_fg_iou_thresh": 0.5,  # each anchor is an object or background, none is left out
    "rpn_bg_iou_thresh": 0.5,
    "rpn_batch_size_per_image": 4096,  # more than there are
    "rpn_nms_thresh": 1.0,  # no proposal is dropped
    "rpn_pre_nms_top_n_train": 4096,
    "rpn_post_nms_top_n_train": 4096,
    "box_batch_size_per_image": 4096,
}
NUM_BOXES = 2


def build():
    torch.manual_seed(0)
    settings = {} if os.environ.get("ZOO_DRAWS") else ALL_TAKEN
    backbone = mobilenet_backbone(
        backbone_name="mobilenet_v3_large",
        weights=None,
        fpn=True,
        norm_layer=torch.nn.BatchNorm2d,
        trainable_layers=6,
    )
    model = FasterRCNN(
        backbone,
        fixed_size=(64, 64),
        rpn_anchor_generator=AnchorGenerator(((16,), (32,), (64,)), ((0.5, 1.0, 2.0),) * 3),
        box_head=TwoMLPHead(backbone.out_channels * 7**2, 64),
        box_predictor=FastRCNNPredictor(64, 4),
        **settings,
    )
    return model.double()


class Photos(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        draw = generator(index)
        height, width = 48 + index % 24, 72 - index % 24
        image = torch.rand(3, height, width, generator=draw, dtype=torch.float64)
        corners = torch.rand(NUM_BOXES, 2, generator=draw, dtype=torch.float64) * 24
        sizes = 12 + torch.rand(NUM_BOXES, 2, generator=draw, dtype=torch.float64) * 12
        labels = torch.randint(1, 4, (NUM_BOXES,), generator=draw)
        return image, {"boxes": torch.cat([corners, corners + sizes], dim=1), "labels": labels}


def collate(samples):
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def by_name(samples):
    """Return a batch as the model's arguments, for the YAML file."""
    images, targets = collate(samples)
    return {"images": images, "targets": targets}


def plain(epochs, report):
    model, data = build(), Photos()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=collate)
    for _ in range(epochs):
        for images, targets in loader:
            loss = sum(model(images, targets).values())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return model


def with_hetexp(epochs, report):
    import hetexp

    model, data = build(), Photos()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    run = hetexp.setup(model, optimizer, data, global_batch_size=BATCH, collate=collate, log_every=1)
    for _ in range(run.epoch, epochs):
        for images, targets in run.batches():
            loss = sum(run.model(images, targets).values())
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    run.save()


def with_accelerate(epochs, report):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, data = build(), Photos()
    if accelerator.num_processes > 1:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    loader = DataLoader(data, batch_sampler=Order(data), collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for images, targets in loader:
            loss = sum(model(images, targets).values())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main(plain, with_hetexp, with_accelerate)
