"""Several cards in one process: who may, what each of them gets, and that nothing else changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import plan_on, unbuilt_config
from torch import Tensor, nn

from hetexp.comm.empty_share import EmptyShareGuard
from hetexp.core.config import read_config
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.summary import blank_summary
from hetexp.hardware.backend import visible_places
from hetexp.launch.processes.members import environment_of
from hetexp.model.gpt import GPT
from hetexp.model.recompute import rebind, recompute_layers, recomputes
from hetexp.strategy.dp import DP, in_one_process

CARDS = [
    DeviceSpec(f"cuda:{i}", "cuda", i, f"Card {i}", "nvidia", uuid=f"GPU-{i}", precisions=("float32",))
    for i in range(3)
]
CPUS = [DeviceSpec(f"cpu:{i}", "cpu", i, "CPU", "cpu") for i in range(2)]
AMD = DeviceSpec("hip:0", "hip", 0, "MI100", "amd")
ARC = DeviceSpec("xpu:0", "xpu", 0, "Arc", "intel")


def problems(devices: list[DeviceSpec], strategy: DP | None = None, **sections: Any) -> list[str]:
    return (strategy or DP()).check(read_config(unbuilt_config(**sections)), devices)


# ---------------------------------------------------------------- who may


def test_cards_of_one_vendor_may() -> None:
    assert problems(CARDS) == []
    assert problems([AMD, replace(AMD, id="hip:1", index=1)]) == []
    assert problems([CARDS[0], CARDS[0]]) == []
    assert problems(CARDS, DP(output_device=2)) == []


@pytest.mark.parametrize(
    ("devices", "start"),
    [
        (CPUS, "`strategy` must be ddp where devices are not all cards of NVIDIA's or of AMD's (cpu:0"),
        ([ARC, ARC], "`strategy` must be ddp where devices are not all cards of"),
        ([CARDS[0], CPUS[0]], "`strategy` must be ddp where devices are not all cards of"),
        ([CARDS[0], AMD], "`strategy` must be ddp where devices are of different vendors (cuda:0"),
        (CARDS[:1], "`strategy` must be ddp or single for one device (cuda:0"),
        (
            [CARDS[0], replace(CARDS[1], slow=2.0)],
            "`strategy` must be ddp where devices are emulated, slowed",
        ),
        ([CARDS[0], replace(CARDS[1], python="/other")], "`strategy` must be ddp where devices have interpr"),
        ([CARDS[0], replace(CARDS[1], uuid="MIG-1")], "`strategy` must be ddp where devices are instances"),
    ],
)
def test_others_are_told_to_take_ddp(devices: list[DeviceSpec], start: str) -> None:
    (problem,) = problems(devices)
    assert problem.startswith(start)
    assert problem.endswith("but is 'dp' instead.")


def test_what_one_process_cannot_have() -> None:
    mixed = [CARDS[0], replace(CARDS[1], precisions=("float32", "bfloat16"))]
    (problem,) = problems(mixed, trainer={"precision": "auto"})
    assert problem.startswith("`trainer.precision` must be auto_common, or one precision")
    assert problems(mixed, trainer={"precision": "auto_common"}) == []
    (problem,) = problems(CARDS[:2], DP(output_device=2))
    assert problem == "`strategy.output_device` must be below the number of cards (2), but is 2 instead."
    slow = {"events": [{"kind": "slow", "device": "cuda:1", "at_step": 2, "factor": 2.0}]}
    (problem,) = problems(CARDS[:2], fault=slow)
    assert problem.startswith("`strategy` must be ddp where `fault.events` slows a device (cuda:1)")


# ---------------------------------------------------------------- the plan


def plan(cards: list[DeviceSpec] = CARDS, shares: tuple[float, ...] = (0.5, 0.25, 0.25)) -> Plan:
    counts = tuple(round(8 * share) for share in shares)
    raw = unbuilt_config(trainer={"seed": 0})
    told = ("The reason.",)
    made = plan_on(cards, raw, shares=shares, local_batch_sizes=counts, strategy="dp", reasons=told)
    return in_one_process(made)


def test_one_rank_drives_all_cards(tmp_path: Any) -> None:
    made = plan()
    assert (made.world_size, made.devices) == (1, (CARDS[0],))
    assert made.all_devices == tuple(CARDS)
    assert (made.shares, made.local_batch_sizes) == ((1.0,), (8,))
    assert made.card_batch_sizes == (4, 2, 2)
    assert made.reasons == ("The reason.", "One process drives all of these cards.")
    made.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == made
    summary = blank_summary(made, "completed")
    assert summary["world_size"] == 1
    assert [(one["id"], one["share"], one["local_batch"]) for one in summary["devices"]] == [
        ("cuda:0", 0.5, 4),
        ("cuda:1", 0.25, 2),
        ("cuda:2", 0.25, 2),
    ]
    apart = plan_on(CARDS, unbuilt_config())
    assert (apart.all_devices, apart.card_batch_sizes) == (tuple(CARDS), ())


def test_the_process_sees_each_card_once() -> None:
    assert environment_of(plan(), 0)["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1,GPU-2"
    assert visible_places(CARDS) == [0, 1, 2]
    twice = [CARDS[2], CARDS[0], CARDS[2]]
    assert environment_of(plan(twice), 0)["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-0"
    assert visible_places(twice) == [0, 1, 0]
    by_number = [replace(card, uuid=None) for card in CARDS]
    environment = environment_of(plan(by_number), 0)
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


# ---------------------------------------------------------------- the passes


class Cards:
    """Stands in for torch's functions, which take tensors of cards only; everything is on the CPU."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def replicate(self, model: nn.Module, devices: list[torch.device]) -> list[nn.Module]:
        return [model] * len(devices)

    def parallel_apply(self, calls: Any, inputs: Any, devices: list[torch.device]) -> list[Any]:
        outputs = [call(*one) for call, one in zip(calls, inputs, strict=True)]
        self.calls.append([len(output) for output in outputs])
        return outputs

    def gather(self, outputs: list[Tensor], device: torch.device, dim: int) -> Tensor:
        return torch.cat(outputs, dim).to(device)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    stand_in = Cards()
    for name in ("replicate", "parallel_apply", "gather"):
        monkeypatch.setattr(torch.nn.parallel, name, getattr(stand_in, name))
    return stand_in


def replicated(model: nn.Module, shares: tuple[float, ...]) -> EmptyShareGuard:
    from hetexp.strategy.chunks import Replicated

    cpu = torch.device("cpu")
    return EmptyShareGuard(Replicated(model, [cpu] * len(shares), shares, cpu))


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.1), (0.0, 1.0), (0.6, 0.0, 0.3, 0.1)])
def test_outputs_and_gradients_are_one_devices(cards: Cards, count: int, shares: tuple[float, ...]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    other = copy.deepcopy(model)
    inputs = torch.linspace(-1, 1, 3 * count, dtype=torch.float64).reshape(count, 3)
    output = replicated(model, shares)(inputs)
    torch.testing.assert_close(output, other(inputs), rtol=1e-12, atol=1e-12)
    output.sin().sum().backward()
    other(inputs).sin().sum().backward()
    for found, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-12)
    (sizes,) = cards.calls
    assert sum(sizes) == count
    assert all(sizes)
    assert len(sizes) <= sum(share > 0 for share in shares)


def test_named_inputs_and_an_empty_share(cards: Cards) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return ids * mask * self.scale

    guard = replicated(Named(), (0.5, 0.5))
    assert guard({"ids": torch.arange(4.0), "mask": torch.arange(4) % 2}).tolist() == [0, 1, 0, 3]
    assert cards.calls == [[2, 2]]
    guard(None).backward()
    assert cards.calls == [[2, 2]]


def test_layers_of_a_replica_compute_again_with_its_own_weights() -> None:
    model = GPT(2, 2, 8, sequence_length=4, vocab_size=5)
    recompute_layers(model)
    replica = copy.copy(model.blocks[0])  # shallow, as `torch.nn.parallel.replicate` copies
    assert vars(replica)["forward"]._layer is model.blocks[0]
    rebind(replica)
    assert recomputes(replica)
    assert vars(replica)["forward"]._layer is replica
    assert vars(model.blocks[0])["forward"]._layer is model.blocks[0]
