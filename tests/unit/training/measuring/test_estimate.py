"""From a configuration and a plan's facts to what each rank needs, and what is said of too small devices."""

from __future__ import annotations

import random
import re
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import unbuilt_config
from torch import nn
from torch.utils.data import TensorDataset

from hetexp.core.config import read_config
from hetexp.core.device import GIB, DeviceSpec
from hetexp.data.base import build_data
from hetexp.hardware.memory.estimate import MemoryEstimate
from hetexp.plan.strategy import Strategy
from hetexp.strategy.ddp import DDP
from hetexp.strategy.pipeline.pieces import layer_names
from hetexp.strategy.single import Single
from hetexp.training.measuring.estimate import RunMemory
from hetexp.training.seeding import seed_all

CARD = DeviceSpec("cuda:0", "cuda", 0, "Some card", "nvidia", 8 * GIB, architecture="sm_90")
HOST = DeviceSpec("cpu:0", "cpu", 0, "Some CPU", "cpu", 8 * GIB)
MODEL = {"_target_": "hetexp.model.mlp.MLP", "hidden_sizes": [4096, 4096]}
DATA = {"_target_": "hetexp.data.synthetic.Synthetic", "num_samples": 32, "input_shape": [1024]}
WEIGHTS = 4 * (1024 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 4) + 512 - 4 * 4 + 16
"""In blocks of 512 bytes: of four biases of the last layer, the block is all."""


def run_memory(
    devices: Sequence[DeviceSpec] = (CARD,),
    sizes: Sequence[int] = (16,),
    precisions: Sequence[str] | None = None,
    strategy: Strategy | None = None,
    model: dict[str, Any] = MODEL,
    data: dict[str, Any] = DATA,
    optimizer: str = "SGD",
    **trainer: Any,
) -> RunMemory:
    raw = unbuilt_config(
        model=model,
        data=data,
        optimizer={"_target_": f"torch.optim.{optimizer}", "lr": 0.1},
        trainer={"global_batch_size": sum(sizes) or 1, **trainer},
    )
    names = precisions or ["float32"] * len(devices)
    return RunMemory(read_config(raw), devices, sizes, names, strategy or Single())


def estimate(memory: RunMemory, rank: int = 0) -> MemoryEstimate:
    found = memory.estimates[rank]
    assert found is not None, memory.reason
    assert found.reason is None
    return found


def only(problems: list[str]) -> str:
    assert len(problems) == 1
    return problems[0]


def test_the_model_is_built_by_the_datas_facts_and_never_filled() -> None:
    memory = run_memory()
    found = estimate(memory)
    assert found.weights == found.gradients == WEIGHTS
    assert found.optimizer_state == 0
    assert estimate(run_memory(optimizer="AdamW")).optimizer_state == 2 * WEIGHTS
    assert all(p.is_meta for p in memory.model.parameters())


def test_every_rank_by_its_own_batch_precision_and_device() -> None:
    memory = run_memory(
        [CARD, CARD, HOST, CARD], [64, 64, 64, 8], ["float32", "bfloat16", "float32", "float32"]
    )
    first, half, host, fewer = (estimate(memory, rank) for rank in range(4))
    assert [e.microbatch_size for e in (first, half, host, fewer)] == [64, 64, 64, 8]
    assert first.workspace
    assert not host.workspace
    assert half.phases["after_forward"] > first.phases["after_forward"]  # weights twice, few samples
    assert fewer.activations is not None
    assert first.activations is not None
    assert fewer.activations < first.activations


def test_equal_ranks_are_measured_once() -> None:
    memory = run_memory([CARD, replace(CARD, id="cuda:1", index=1)], [16, 16])
    assert memory.estimates[0] is memory.estimates[1]


def test_a_like_run_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_memory(sizes=[6]).estimates
    monkeypatch.setattr("hetexp.training.measuring.estimate.estimate_memory", None)  # whoever measures fails
    assert run_memory(sizes=[6]).estimates == first
    monkeypatch.undo()
    checkpointing = run_memory(sizes=[6], activation_checkpointing=True).estimates
    narrower = run_memory(sizes=[6], data=DATA | {"input_shape": [512]}).estimates
    assert all(found[0] is not first[0] for found in (checkpointing, narrower))


@pytest.mark.parametrize(
    ("trainer", "size"),
    [({}, 16), ({"accumulate": 3}, 6), ({"microbatch_size": 5}, 4), ({"microbatch_size": 100}, 16)],
)
def test_the_largest_microbatch_counts(trainer: dict[str, Any], size: int) -> None:
    assert estimate(run_memory(**trainer)).microbatch_size == size


def test_a_rank_without_samples_needs_weights_gradients_and_state() -> None:
    found = estimate(run_memory([CARD], [0]))
    assert (found.microbatch_size, found.activations) == (0, 0)
    assert found.gradients == WEIGHTS


def test_float64_doubles_weights() -> None:
    assert estimate(run_memory(precisions=["float64"])).weights == pytest.approx(2 * WEIGHTS, rel=1e-3)


def test_under_ddp_gradients_stay_and_accumulation_adds_buckets() -> None:
    single, ddp = estimate(run_memory()), estimate(run_memory(strategy=DDP()))
    assert ddp.buckets == 0
    assert ddp.allocated_bytes > single.allocated_bytes
    assert estimate(run_memory(strategy=DDP(), accumulate=2)).buckets == WEIGHTS
    apart = estimate(run_memory(strategy=DDP(gradient_as_bucket_view=False)))
    assert apart.buckets == WEIGHTS


def test_tokens_and_images_have_estimates() -> None:
    tokens = {"_target_": "hetexp.data.synthetic.Synthetic", "kind": "tokens"}
    gpt = {"_target_": "hetexp.model.gpt.GPT"}
    images = {"_target_": "hetexp.data.synthetic.Synthetic", "input_shape": [3, 8, 8]}
    convnet = {"_target_": "hetexp.model.convnet.ConvNet"}
    for model, data in ((gpt, tokens), (convnet, images)):
        for precision in ("float32", "bfloat16"):
            assert estimate(run_memory(model=model, data=data, precisions=[precision])).activations


def test_nothing_is_said_of_devices_that_are_large_enough_or_unknown() -> None:
    assert run_memory().problems() == []
    assert run_memory([replace(CARD, memory_bytes=None)], [10**6]).problems() == []


def test_too_many_samples_are_told_with_the_number_that_fits() -> None:
    memory = run_memory([CARD], [200_000])
    problem = only(memory.problems())
    start = r"`trainer.microbatch_size` must be at most (\d+) on cuda:0 \(Some card\), but is null instead. "
    told = re.match(start + r"A step needs (\d+\.\d\d) GiB for 200000 samples at once \(weights ", problem)
    assert told, problem
    largest = int(told[1])
    assert problem.endswith(f"and the device has 8.00 GiB. Write trainer.microbatch_size={largest}.")
    assert estimate(memory).total_bytes / GIB == pytest.approx(float(told[2]), abs=0.01)
    # With what was advised the run fits, with some headroom; with a fifth more it does not.
    assert run_memory([CARD], [200_000], microbatch_size=largest).problems() == []
    more = int(1.05 * largest)
    assert run_memory([CARD], [2 * more], microbatch_size=more).problems() == []
    more = int(1.2 * largest)
    assert run_memory([CARD], [2 * more], microbatch_size=more).problems()


def test_the_last_sample_is_advised_without_headroom() -> None:
    nodes: dict[str, Any] = {
        "model": {"_target_": "hetexp.model.convnet.ConvNet", "widths": [64]},
        "data": {
            "_target_": "hetexp.data.synthetic.Synthetic",
            "input_shape": [3, 256, 256],
            "num_samples": 4,
            "num_test_samples": 0,
        },
    }
    one = estimate(run_memory([CARD], [2], microbatch_size=1, **nodes)).total_bytes
    assert one < estimate(run_memory([CARD], [2], **nodes)).total_bytes
    small = replace(CARD, memory_bytes=one)
    problem = only(run_memory([small], [2], **nodes).problems())
    assert problem.endswith("Write trainer.microbatch_size=1.")
    assert run_memory([small], [2], microbatch_size=1, **nodes).problems() == []


def test_with_accumulation_the_advice_replaces_it() -> None:
    problem = only(run_memory([CARD], [800_000], accumulate=2).problems())
    assert re.search(r"Write trainer.microbatch_size=\d+ and trainer.accumulate=1\.$", problem)


SMALL = replace(CARD, memory_bytes=2 * GIB)


def test_passes_are_chosen_only_where_the_whole_does_not_fit() -> None:
    devices = [SMALL, CARD, replace(CARD, memory_bytes=None)]
    memory = run_memory(devices, [16384] * 3)
    size, *others = memory.largest_passes([16384] * 3)
    assert others == [None, None]
    assert size is not None and 1 < size < 16384
    assert memory.largest_passes([1, 16384, 16384]) == [None] * 3
    assert memory.largest_passes([0, 0, 0]) == [None] * 3
    assert len(memory.problems()) == 1
    chosen = memory.of(devices, [16384] * 3, ["float32"] * 3, [size, None, None])
    assert chosen.problems() == []
    assert estimate(chosen).microbatch_size <= size


@pytest.mark.parametrize("trainer", [{"microbatch_size": 16384}, {"accumulate": 2}])
def test_what_the_person_chose_is_kept(trainer: dict[str, Any]) -> None:
    memory = run_memory([SMALL], [32768], **trainer)
    assert memory.largest_passes([32768]) == [None]
    assert len(memory.problems()) == 1


def test_a_static_graph_has_one_pass() -> None:
    memory = run_memory([SMALL], [16384], strategy=DDP(static_graph=True))
    assert memory.largest_passes([16384]) == [None]
    assert memory.caps()[0] not in (None, 0)


def test_a_device_that_holds_no_sample_is_told_and_gets_no_share() -> None:
    memory = run_memory([replace(CARD, memory_bytes=2**20), SMALL], [4096, 4096])
    assert memory.largest_passes([4096, 0]) == [0, None]
    assert memory.caps() == [0, None]
    with_passes = memory.of([replace(CARD, memory_bytes=2**20)], [4096], ["float32"])
    assert "`model` must fit on cuda:0" in only(with_passes.problems())


def test_each_small_device_is_named() -> None:
    small = replace(CARD, id="cuda:1", name="Small card", memory_bytes=4 * GIB)
    problems = run_memory([CARD, small], [200_000, 200_000]).problems()
    assert ["cuda:0" in problems[0], "cuda:1 (Small card)" in problems[1]] == [True, True]
    numbers = [int(re.search(r"at most (\d+)", problem)[1]) for problem in problems]  # type: ignore[index]
    assert numbers[0] > numbers[1]


def test_a_model_that_fits_not_even_with_one_sample() -> None:
    tiny = replace(CARD, memory_bytes=GIB // 2)
    problem = only(run_memory([tiny], [64]).problems())
    start = "`model` must fit on cuda:0 (Some card), which has 0.50 GiB, but needs 1."
    assert problem.startswith(start), problem
    assert " for 1 sample (" in problem


@pytest.fixture
def project() -> Any:
    """A person's own module, importable as `a_project`."""
    module: Any = types.ModuleType("a_project")
    sys.modules["a_project"] = module
    yield module
    del sys.modules["a_project"]


class Net(nn.Module):
    """Takes a dict and reads a value while it is built, which only real tensors have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.scale = float(torch.ones(3).sum())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(features) * self.scale
        return out


class Samples:
    """Samples whose inputs are a dict."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"features": torch.rand(8)}, index % 4


def test_a_persons_own_model_with_inputs_by_name(project: Any) -> None:
    project.Net, project.Samples = Net, Samples
    found = estimate(run_memory(model={"_target_": "a_project.Net"}, data={"_target_": "a_project.Samples"}))
    assert found.weights == 512 + 512


class Drawn:
    """Draws which samples it has, and what is in them, by all generators."""

    def __init__(self) -> None:
        self.facts = {"input_shape": [3], "num_classes": 2 + random.randrange(1000)}
        self.shift = float(np.random.randn()) + float(torch.randn(()))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        noise = random.gauss(0.0, 1.0) + np.random.randn(3) + torch.randn(3).numpy()
        return torch.tensor(self.shift + noise, dtype=torch.float32), 0


def test_data_are_drawn_as_by_a_rank_and_nothing_else_is(project: Any) -> None:
    project.Drawn = Drawn
    data = {"_target_": "a_project.Drawn"}
    seed_all(4)
    rank, samples = build_data(data), []
    for before in (0, 1):
        seed_all(before)
        expected = random.random(), float(np.random.rand()), float(torch.rand(()))
        seed_all(before)
        memory = run_memory(data=data, seed=4)
        assert memory.data_facts == rank.facts
        assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected
        samples.append(memory.sample[0])
    assert torch.equal(*samples)


def test_layers_are_those_of_the_ranks_data(project: Any) -> None:
    """A model may have as many layers as its data say."""
    project.Drawn = Drawn
    project.Deep = lambda input_shape=None, num_classes=None: nn.Sequential(
        *(nn.Linear(3, 3) for _ in range(num_classes))
    )
    raw = unbuilt_config(model={"_target_": "a_project.Deep"}, data={"_target_": "a_project.Drawn"})
    names = []
    for seed in (4, 5):
        raw["trainer"]["seed"] = seed
        names.append(layer_names(read_config(raw)))
        seed_all(seed)
        assert len(names[-1]) == build_data(raw["data"]).facts["num_classes"]
    assert names[0] != names[1]


class Reads(Net):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features) * features.max().item()


def test_a_model_that_cannot_run_without_values_is_judged_by_what_is_certain(project: Any) -> None:
    project.Net, project.Samples = Reads, Samples
    nodes: dict[str, Any] = {
        "model": {"_target_": "a_project.Net"},
        "data": {"_target_": "a_project.Samples"},
    }
    memory = run_memory(**nodes)
    assert memory.estimates[0] is not None
    assert memory.estimates[0].activations is None
    assert "item" in (memory.estimates[0].reason or "")
    assert memory.problems() == []
    problem = only(run_memory([replace(CARD, memory_bytes=2**20)], **nodes).problems())
    assert "but needs at least " in problem


@pytest.mark.parametrize("broken", ["model", "data", "sample", "pair"])
def test_what_is_broken_is_left_to_the_ranks_and_named(project: Any, broken: str) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such thing\nand more")

    project.Net, project.Samples = Net, Samples
    if broken == "model":
        project.Net = fail
    elif broken == "data":
        project.Samples = fail
    elif broken == "sample":
        project.Samples = type("Failing", (Samples,), {"__getitem__": fail})
    else:
        project.Samples = lambda: TensorDataset(*[torch.rand(4, 8)] * 3)
    nodes: dict[str, Any] = {
        "model": {"_target_": "a_project.Net"},
        "data": {"_target_": "a_project.Samples"},
    }
    memory = run_memory(**nodes)
    assert memory.estimates == [None]
    assert memory.problems() == []
    assert memory.reason
    if broken != "pair":
        assert "no such thing" in memory.reason
    assert "\n" not in memory.reason


def test_a_loss_that_is_not_there_is_left_to_others() -> None:
    assert run_memory(loss="nowhere.Loss").estimates == [None]
