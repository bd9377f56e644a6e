"""BatchNorm over real cards and the CPU, and activations that are computed again on a card."""

from __future__ import annotations

import pytest
import torch
from support import Train, worst
from torch.nn import functional

from hetexp.core.device import DeviceSpec
from hetexp.hardware.memory.estimate import Workload, estimate_memory
from hetexp.hardware.memory.rules import rules_for
from hetexp.model.gpt import GPT
from hetexp.model.recompute import recompute_layers

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


@pytest.mark.parametrize("weights", ["[24,8]", "[31,1]", "[32,0]"])
@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_two_cards(train: Train, weights: str, backend: str) -> None:
    check(train, "hardware.devices=[cuda:0,cuda:1]", f"balancing.weights={weights}", f"comm={backend}")


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
