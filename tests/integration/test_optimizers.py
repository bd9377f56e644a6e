"""Parameter groups, Muon and schedules of any class: the steps of one device, also after a resume."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support import Run, Train, start_run, worst

from hetexp.core.errors import RunFailedError

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
    "adafactor": (
        *("optimizer._target_=transformers.optimization.Adafactor", "+optimizer.relative_step=false"),
        "trainer.schedule={_target_:transformers.get_cosine_schedule_with_warmup,num_warmup_steps:2}",
    ),
}
MISSING = {
    "muon": pytest.mark.skipif(
        not hasattr(torch.optim, "Muon"), reason=f"torch {torch.__version__} has no Muon"
    ),
    "adafactor": pytest.mark.skipif(
        find_spec("transformers") is None, reason="transformers is not installed"
    ),
}
EACH_CASE = [pytest.param(case, marks=MISSING.get(case, ())) for case in CASES]


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
@pytest.mark.parametrize("case", EACH_CASE)
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


@pytest.mark.parametrize("case", EACH_CASE)
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


@pytest.mark.parametrize("strategy", ["ddp", "pipeline", "local_sgd"])
def test_a_checkpoint_has_the_groups_of_the_whole_model(train: Train, strategy: str) -> None:
    options = {"local_sgd": ("strategy.sync_every=1",)}.get(strategy, ())
    run = train(*COMMON, *TWO, *GROUPS, f"strategy={strategy}", *options)
    text = (run.folder / "checkpoints" / f"step_{STEPS:08}" / "state.json").read_text()
    found = {
        tuple(group["params"]): {key: group["values"][key] for key in ("initial_lr", "weight_decay")}
        for group in json.loads(text)["optimizer"]["param_groups"]
    }
    usual: dict[str, Any] = {"initial_lr": 0.001, "weight_decay": 0.01}
    assert found == {
        ("layers.3.weight", "layers.5.weight"): usual,
        ("layers.1.weight",): usual | {"initial_lr": 0.05},
        ("layers.1.bias",): usual | {"initial_lr": 0.05, "weight_decay": 0.0},
        ("layers.3.bias", "layers.5.bias"): usual | {"weight_decay": 0.0},
    }


def test_rates_follow_the_batch_and_the_plan_says_so(train: Train, single: Callable[..., Run]) -> None:
    words = ("optimizer.lr=0.01", "trainer.lr_batch_size=64", "trainer.lr_scaling=sqrt")
    run = train("hardware=cpu", "strategy=single", *COMMON, *words)
    reference = single("optimizer.lr=0.005")
    assert rates(run) == rates(reference)
    assert worst(run, reference, STEPS) == (0.0, 0.0)
    assert "The learning rate is 0.005 = 0.01 × √(16/64) (trainer.lr_batch_size)." in run.screen


def test_a_group_that_matches_nothing_ends_the_run_at_its_start(train: Train) -> None:
    with pytest.raises(RunFailedError) as caught:
        train(*COMMON, *TWO, 'optimizer.groups=[{match:"head.*",lr:0.1}]')
    assert "`optimizer.groups[0].match` must match a trained parameter" in str(caught.value.details)


def test_groups_typed_on_resume_hold(train: Train, single: Callable[..., Run]) -> None:
    first = single('optimizer.groups=[{match:"*.bias",weight_decay:0.0}]')
    folder = first.folder / "checkpoints" / "step_00000004"
    again = train(
        *("hardware=cpu", "strategy=single", *COMMON, f"resume={folder}"),
        'optimizer.groups=[{match:"*.bias",weight_decay:40.0}]',
    )
    assert "weight_decay=40.0 (before: 0.0)" in again.screen
    assert rates(again) == rates(first)[4:]
    bias, before = (run.parameters()["layers.1.bias"].norm() for run in (again, first))
    assert bias < 0.9 * before
    with pytest.raises(RunFailedError) as caught:
        train("hardware=cpu", "strategy=single", *COMMON, f"resume={folder}")
    assert "optimizer.groups" in str(caught.value.details)


# ---------------------------------------------------------------- what ends a run, and what it relies on


def test_steps_alone_lift_the_default_epochs(train: Train) -> None:
    """Case 98: 6 steps an epoch."""
    run = train(
        "hardware=cpu", "strategy=single", *COMMON, "trainer.max_steps=40", "trainer.checkpoint_every=0"
    )
    assert run.summary["steps"] == 40
    both = train(*("hardware=cpu", "strategy=single"), *COMMON, "trainer.max_epochs=1")
    assert both.summary["steps"] == 6
    assert "Ends after 1 epoch = 6 steps, before trainer.max_steps=8." in both.screen


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("trainer.early_stopping.patience=2",), "trainer.early_stopping.patience"),
        (PLATEAU, "trainer.schedule"),
    ],
)
def test_what_needs_evaluation_data_is_refused_without(
    train: Train, words: tuple[str, ...], key: str
) -> None:
    """Case 97."""
    with pytest.raises(RunFailedError) as caught:
        train(*COMMON, *TWO, *words, "+data.evaluation=0")
    assert f"`{key}` needs evaluation data, but `data` has none." in str(caught.value.details)


def test_evaluations_without_data_leave_no_empty_lines(train: Train) -> None:
    """Case 97."""
    run = train(*COMMON, *TWO, "+data.evaluation=0")
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))


# ---------------------------------------------------------------- the same data


def test_another_split_on_each_rank_is_refused(train: Train) -> None:
    """Case 68."""
    with pytest.raises(RunFailedError) as caught:
        train(*COMMON, *TWO, "data._target_=own_data.OwnSplit")
    text = str(caught.value.details)
    # Two permutations may begin with the same sample.
    assert re.search(
        r"sample \d+ of the training data is another one on rank 1 \(cpu:1\) than on rank 0", text
    )
    assert "seed" in text


@pytest.mark.parametrize("unseeded", [False, True])
def test_random_samples_are_no_difference(train: Train, unseeded: bool) -> None:
    run = train(*COMMON, *TWO, "data._target_=own_data.Noisy", f"+data.unseeded={unseeded}")
    assert run.summary["steps"] == STEPS


def test_a_resume_names_other_data(train: Train, single: Callable[..., Run]) -> None:
    first = single()
    folder = first.folder / "checkpoints" / "step_00000004"
    base = ("hardware=cpu", "strategy=single", *COMMON, f"resume={folder}")
    other = train(*base, "+data.seed=7")
    assert "the training data are not those of the checkpoint: another sample 0." in other.screen
    assert "Its place in the epoch is lost: epoch 2 begins." in other.screen
    assert "the evaluation data are not those of the checkpoint: another sample 0." in other.screen
    assert [row["train/epoch"] for row in other.metrics if "train/loss" in row] == [1, 1, 1, 1]
    longer = train(*base, "+data.count=128", "trainer.max_steps=null", "trainer.max_epochs=2")
    assert "128 samples instead of 96" in longer.screen
    assert longer.summary["steps"] == 4 + 8  # one epoch of the new data is left
    same = train(*base)
    assert "not those of the checkpoint" not in same.screen
