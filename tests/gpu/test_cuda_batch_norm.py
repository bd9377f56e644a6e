"""BatchNorm over real cards and the CPU, and activations that are computed again on a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchanging import each
from support import Train, worst
from torch import Tensor, nn
from torch.nn import functional

from hetexp.comm.communicator import ProcessGroupCommunicator
from hetexp.comm.connections.pulse import Pulse
from hetexp.core.device import DeviceSpec
from hetexp.hardware.memory.estimate import Workload, estimate_memory
from hetexp.hardware.memory.rules import rules_for
from hetexp.model.gpt import GPT
from hetexp.model.recompute import recompute_layers
from hetexp.strategy.ddp import DDP

STEPS = 20
NET = (
    "data=synthetic",
    "data.num_samples=240",
    "data.num_test_samples=20",
    "data.input_shape=[1,6,6]",
    "model=convnet",
    "model.norm=batch",
    "model.widths=[4,6]",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)


def check(train: Train, *layout: str) -> None:
    reference = train(*NET, "hardware=cpu", "strategy=single")
    loss, parameters = worst(train(*NET, *layout, "balancing=manual"), reference, STEPS)
    print(f"BatchNorm {layout}: loss {loss:.2e}, parameters {parameters:.2e}")
    assert loss <= 1e-12
    assert parameters <= 1e-12


@pytest.mark.parametrize("weights", ["[24,8]", "[31,1]", "[32,0]", "[0,32]"])
def test_a_card_and_the_cpu(train: Train, weights: str) -> None:
    check(train, "hardware.devices=[cuda:0,cpu]", f"balancing.weights={weights}")


@pytest.mark.parametrize("weights", ["[24,8]", "[32,0]"])
@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_two_cards(train: Train, weights: str, backend: str) -> None:
    check(train, "hardware.devices=[cuda:0,cuda:1]", f"balancing.weights={weights}", f"comm={backend}")


CASES = tuple((kind, shares) for kind in ("images", "flat") for shares in ((6, 2), (7, 1), (8, 0), (0, 8)))
"""Nets, and the samples of each of two ranks."""


def net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3),
        nn.BatchNorm2d(6, affine=False),
    ]
    if kind == "flat":
        layers += [nn.Flatten(), nn.Linear(96, 8), nn.BatchNorm1d(8, momentum=None)]
    return nn.Sequential(*layers).double()


def images() -> Tensor:
    """Later samples are far from the first: statistics of a part of them are wrong."""
    values = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return values + torch.arange(8).reshape(-1, 1, 1, 1)


def weigh(output: Tensor) -> Tensor:
    factors = torch.linspace(0.5, 2, output[0].numel(), dtype=output.dtype, device=output.device)
    return (output.sin() * factors.reshape(output[0].shape)).sum()


@contextmanager
def no_waits() -> Iterator[None]:
    """Let what waits for the card fail."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def _trained(
    rank: int, size: int, store: dist.Store, kinds: list[str], last: bool
) -> dict[tuple[Any, ...], Any]:
    """Return the model's tensors after three steps, for each kind of net and each share of the samples.

    If the cards exchange by themselves, the third step may not wait for them.
    """
    device = torch.device(kinds[rank])
    library = "nccl" if kinds == ["cuda:0", "cuda:1"] else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(library, store=dist.PrefixStore("g", store), rank=rank, world_size=size)
    communicator = ProcessGroupCommunicator(device, Pulse(dist.PrefixStore("p", store), rank, size, 60.0))
    order = torch.channels_last if last else torch.contiguous_format
    inputs, results = images().to(device, memory_format=order), {}
    for kind, shares in CASES:
        model, strategy = net(kind).to(device), DDP()
        module = strategy.wrap(model, device)
        strategy.attach_group(module, communicator, inputs[:2], nullcontext)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        start = sum(shares[:rank])
        local = inputs[start : start + shares[rank]] if shares[rank] else None
        for step in range(3):
            with no_waits() if step == 2 and library == "nccl" and kind == "images" else nullcontext():
                output = module(local)
                (output if local is None else weigh(output) * size).backward()
            optimizer.step()
            optimizer.zero_grad()
        results[kind, shares] = {name: tensor.cpu().numpy() for name, tensor in model.state_dict().items()}
    return results


def check_ranks(folder: Path, kinds: list[str], last: bool) -> None:
    results = each(len(kinds), folder, _trained, kinds, last, seconds=100.0)
    for kind, shares in CASES:
        reference = net(kind)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            weigh(reference(images())).backward()
            optimizer.step()
        found = [result[kind, shares] for result in results]
        for name, wanted in reference.state_dict().items():
            for state in found:
                here = torch.as_tensor(state[name])
                torch.testing.assert_close(
                    here, wanted, rtol=1e-12, atol=1e-12, msg=f"{kind} {shares} {name}"
                )
                assert torch.equal(here, torch.as_tensor(found[0][name])) or "cpu" in kinds


@pytest.mark.parametrize("last", [False, True])
def test_steps_of_two_cards_are_those_of_one(tmp_path: Path, last: bool) -> None:
    check_ranks(tmp_path, ["cuda:0", "cuda:1"], last)


@pytest.mark.parametrize("kinds", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"]])
@pytest.mark.parametrize("last", [False, True])
def test_steps_through_the_host_are_those_of_one(tmp_path: Path, kinds: list[str], last: bool) -> None:
    check_ranks(tmp_path, kinds, last)


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_memory_estimate_is_near(recomputed: bool) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda:0")
    model = GPT(12, 8, 256, sequence_length=256, vocab_size=512)
    if recomputed:
        recompute_layers(model)
    tokens = torch.randint(512, (16, 256))
    spec = DeviceSpec(
        id="cuda:0",
        backend="cuda",
        index=0,
        name=torch.cuda.get_device_name(0),
        vendor="nvidia",
        memory_bytes=torch.cuda.get_device_properties(0).total_memory,
    )
    workload = Workload(
        model,
        lambda model: torch.optim.AdamW(model.parameters()),
        lambda output, targets: functional.cross_entropy(output.flatten(0, 1), targets.flatten()),
        (tokens[:1], tokens[:1]),
    )
    estimate = estimate_memory(workload, 16, rules_for(spec))
    model.to(device)
    optimizer = workload.build_optimizer(model)
    tokens = tokens.to(device)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model(tokens), tokens).backward()
        optimizer.step()
    peak = torch.cuda.max_memory_allocated()
    print(
        f"recomputed {recomputed}: {peak / 2**20:.0f} MiB, estimated {estimate.allocated_bytes / 2**20:.0f}"
    )
    assert estimate.allocated_bytes == pytest.approx(peak, rel=0.15)


def test_dropout_on_the_card_is_repeated() -> None:
    """The card's own generator gives the second pass what it gave the first."""
    tokens = torch.randint(32, (4, 16), device="cuda:0")
    gradients = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = GPT(2, 2, 32, sequence_length=16, vocab_size=32, dropout=0.4).to("cuda:0", torch.float64)
        if recomputed:
            recompute_layers(model)
        model(tokens).sin().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        gradients.append(torch.rand(3, device="cuda:0").double())
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-12, atol=1e-12)
    assert torch.equal(gradients[1], gradients[3])
