"""Parameter groups, Muon and schedules of any class: the steps of one device, also after a resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support import Run, Train, start_run, worst

STEPS = 8
COMMON = (
    "data=custom",
    "data._target_=own_data.Rows",
    "model=mlp",
    "model.hidden_sizes=[16,12]",
    "trainer.global_batch_size=16",
    f"trainer.max_steps={STEPS}",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
    "trainer.eval_every=2",
)
TWO = ("hardware.devices=[cpu,cpu]", "balancing=manual", "balancing.weights=[0.7,0.3]")
SCHEDULER = "torch.optim.lr_scheduler"
GROUPS = (
    'optimizer.groups={first:{match:"layers.1.*",lr:0.05},biases:{match:["*.bias"],betas:[0.8,0.9]}}',
    "optimizer.no_decay=true",
    "trainer.schedule=cosine",
)
PLATEAU = (
    "optimizer=sgd",
    "optimizer.lr=0.5",
    f"trainer.schedule={{_target_:{SCHEDULER}.ReduceLROnPlateau,patience:0,threshold:0.5,factor:0.3}}",
    "trainer.eval_every=1",
)
CASES = {
    "groups": GROUPS,
    "muon": ("optimizer=muon", 'optimizer.groups=[{match:"*.bias",weight_decay:0.3}]'),
    "one cycle": (f"trainer.schedule={{_target_:{SCHEDULER}.OneCycleLR,max_lr:0.1}}",),
    "epochs": (
        "optimizer=sgd",
        f"trainer.schedule={{_target_:{SCHEDULER}.ExponentialLR,gamma:0.1}}",
        "trainer.schedule_every=epoch",
        "data.count=48",
    ),
    "plateau": PLATEAU,
}
STRATEGIES = ("ddp", "pipeline", "local_sgd")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """The reference: one device; trained once for all that compare with it."""

    @cache
    def start(*overrides: str) -> Run:
        folder = tmp_path_factory.mktemp("single") / "run"
        return start_run(folder, ("hardware=cpu", "strategy=single", *COMMON, *overrides))

    return start


def rates(run: Run) -> list[float]:
    return [row["train/learning_rate"] for row in run.metrics if "train/learning_rate" in row]


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_device(
    train: Train, single: Callable[..., Run], case: str, strategy: str
) -> None:
    more = [word for word in CASES[case] if not word.startswith("data.count")]
    more += [f"+{word}" for word in CASES[case] if word.startswith("data.count")]
    reference = single(*more)
    run = train(*COMMON, *TWO, f"strategy={strategy}", *more)
    loss, parameters = worst(run, reference, STEPS)
    assert loss <= 1e-12
    assert parameters <= 1e-12
    assert rates(run) == rates(reference)
    if "schedule" in "".join(more):
        assert len(set(rates(run))) > 1


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_to_the_bit(train: Train, single: Callable[..., Run], case: str) -> None:
    more = [word if not word.startswith("data.count") else f"+{word}" for word in CASES[case]]
    whole = single(*more)
    folder = whole.folder / "checkpoints" / "step_00000005"
    assert folder.is_dir(), list((whole.folder / "checkpoints").iterdir())
    resumed = train("hardware=cpu", "strategy=single", *COMMON, *more, f"resume={folder}")
    assert rates(resumed) == rates(whole)[5:]
    for name, value in resumed.parameters().items():
        assert torch.equal(value, whole.parameters()[name]), name
    spread = train(*COMMON, *TWO, *more, f"resume={folder}")  # on other devices
    assert rates(spread) == rates(whole)[5:]


def optimizer_of(run: Run, step: int = STEPS) -> dict[str, Any]:
    import json

    text = (run.folder / "checkpoints" / f"step_{step:08}" / "state.json").read_text()
    state: dict[str, Any] = json.loads(text)["optimizer"]
    return state
