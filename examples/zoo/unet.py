"""diffusers' UNet2D learns to find the noise in images.

A script for one device draws noise and time within the loop. Here each sample brings its own, the same on
whatever device.
"""

import torch
from common import BATCH, NUM_SAMPLES, Order, generator, main
from diffusers import DDPMScheduler, UNet2DModel
from torch import nn
from torch.utils.data import DataLoader, Dataset


def build():
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).double()


class Noisy(Dataset):
    def __init__(self):
        self.schedule = DDPMScheduler(num_train_timesteps=100)

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        draw = generator(index)
        image = torch.rand(3, 16, 16, generator=draw, dtype=torch.float64)
        noise = torch.randn(3, 16, 16, generator=draw, dtype=torch.float64)
        time = torch.randint(100, (), generator=draw)
        noisy = self.schedule.add_noise(image[None], noise[None], time[None])[0]
        return {"sample": noisy, "timestep": time, "noise": noise}


def plain(epochs, report):
    model, data = build(), Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_sampler=Order(data))
    for _ in range(epochs):
        for batch in loader:
            found = model(batch["sample"], batch["timestep"]).sample
            loss = nn.functional.mse_loss(found, batch["noise"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return model


def with_hetexp(epochs, report):
    import hetexp

    model, data = build(), Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = hetexp.setup(model, optimizer, data, global_batch_size=BATCH, log_every=1)
    for _ in range(run.epoch, epochs):
        for batch in run.batches():
            found = run.model(batch["sample"], batch["timestep"]).sample
            loss = nn.functional.mse_loss(found, batch["noise"])
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    run.save()


def with_accelerate(epochs, report):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, data = build(), Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_sampler=Order(data))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for batch in loader:
            found = model(batch["sample"], batch["timestep"]).sample
            loss = nn.functional.mse_loss(found, batch["noise"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            report(loss)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main(plain, with_hetexp, with_accelerate)
