"""Whole runs in which devices compute in what they are good at (cases 9 and 10)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support import Run, Train, difference, worst

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, RunFailedError
from hetexp.hardware.backends.cpu import CpuBackend

FULL = ("float64", "float32")
SYNTHETIC = ("data=synthetic", "data.num_samples=240", "data.num_test_samples=50")
GPT = (
    *SYNTHETIC,
    "data.kind=tokens",
    "data.mask_fraction=0.6",
    "model=gpt",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.embedding_size=16",
    "model.tie_weights=true",
)
MLP = (*SYNTHETIC, "model=mlp", "model.hidden_sizes=[32]")
BURSTING = (*SYNTHETIC, "model=custom", "model._target_=bursting.Net")
COMMON = ("trainer.max_epochs=null", "trainer.global_batch_size=32", "trainer.log_every=1")
Options = tuple[str, ...]
Cpus = Callable[..., None]


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Cpus:
    """Return a function that says in what the CPU ranks compute natively beside full precision, in turn.

    The launcher asks the CPU it runs on; these tests train in half precision on every CPU, native or not.
    """
    described = CpuBackend.describe

    def say(*half: str) -> None:
        def describe(index: int) -> DeviceSpec:
            return replace(described(index), precisions=(*FULL, *half[index % len(half)].split()))

        monkeypatch.setattr(CpuBackend, "describe", describe)

    return say


def split(*counts: int) -> Options:
    devices = ",".join(["cpu"] * len(counts))
    weights = ",".join(map(str, counts))
    return f"hardware.devices=[{devices}]", "balancing=manual", f"balancing.weights=[{weights}]"


def precisions(run: Run) -> list[str]:
    return [device["precision"] for device in run.summary["devices"]]


def column(run: Run, name: str) -> list[float]:
    return [row[name] for row in run.metrics if "train/loss" in row]


def weights_at_steps(folder: Path, passes: int = 1) -> list[str]:
    """Return a hash of one rank's weights at each training step and at the last evaluation."""
    kinds = [line.split() for line in folder.read_text().splitlines()]
    trained = [weights for kind, weights in kinds if kind == "train"]
    trained = trained[1:] if folder.stem == "0" else trained  # rank 0 alone tries the first samples
    return [*trained[::passes], next(weights for kind, weights in kinds if kind == "eval")]


# ---------------------------------------------------------------- what is chosen


def test_emulated_cards_compute_in_what_they_have(train: Train) -> None:
    run = train(
        *MLP,
        *COMMON,
        "hardware.devices=[emulated:rtx_3090,emulated:rtx_2080_ti]",
        "trainer.precision=auto",
        "trainer.max_steps=4",
    )
    assert precisions(run) == ["bfloat16", "float16"]
    assert run.summary["comm"]["wire_dtype"] == "float32"
    assert column(run, "train/loss_scale") == [2.0**16] * 4
    assert column(run, "train/skipped_steps") == [0] * 4
    plan = json.loads((run.folder / "plan.json").read_text())
    assert plan["precisions"] == ["bfloat16", "float16"]
    assert any("emulated:0 bfloat16, emulated:1 float16" in reason for reason in plan["reasons"])
    assert any("loss scale" in reason for reason in plan["reasons"])


def test_a_precision_that_a_card_lacks_is_refused_before_anything_starts(
    train: Train, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        train(
            *MLP,
            *COMMON,
            "hardware.devices=[emulated:rtx_3090,emulated:rtx_2080_ti,emulated:t4]",
            "trainer.precision=bf16",
            "trainer.max_steps=4",
            folder=tmp_path / "run",
        )
    (problem,) = caught.value.problems
    assert "emulated:1 (RTX 2080 Ti (emulated)) computes in (" in problem
    assert "emulated:2 (T4 (emulated)) in (" in problem or "emulated:2 (Tesla T4" in problem
    assert "emulated:0" not in problem
    assert "'bfloat16'" in problem and "trainer.precision=auto" in problem
    assert not (tmp_path / "run" / "plan.json").exists()


def test_long_names_whatever_was_typed(train: Train, cpus: Cpus) -> None:
    cpus("bfloat16")
    run = train(*MLP, *COMMON, *split(3, 1), "trainer.precision=bf16", "trainer.max_steps=2")
    assert precisions(run) == ["bfloat16", "bfloat16"]
    assert run.summary["comm"]["wire_dtype"] == "float32"
    assert "train/loss_scale" not in run.metrics[0]
    run = train(*MLP, *COMMON, *split(3, 1), "trainer.precision=fp64", "trainer.max_steps=2")
    assert precisions(run) == ["float64", "float64"]
    assert run.summary["comm"]["wire_dtype"] == "float64"


# ---------------------------------------------------------------- bfloat16


@pytest.mark.parametrize("model", [MLP, GPT], ids=["mlp", "gpt"])
def test_bfloat16_differs_no_more_than_microbatches_do(train: Train, cpus: Cpus, model: Options) -> None:
    cpus("bfloat16")
    steps = 20
    options = (
        *model,
        *COMMON,
        "trainer.precision=bf16",
        f"trainer.max_steps={steps}",
        "trainer.checkpoint_every=1",
    )
    one, *others = (
        train("hardware=cpu", "strategy=single", *options, f"trainer.accumulate={n}") for n in (1, 2, 4)
    )
    allowed = 2 * max(worst(other, one, steps)[1] for other in others)
    assert 0 < allowed < 5e-2
    assert worst(train(*options, *split(24, 8)), one, steps)[1] <= allowed
    full = train("hardware=cpu", "strategy=single", *model, *COMMON, f"trainer.max_steps={steps}")
    assert difference(one.parameters(), full.parameters()) > 1e-6  # it was another precision


# ---------------------------------------------------------------- one scale, one decision


@pytest.mark.parametrize(
    ("layout", "half", "options"),
    [
        (split(24, 8), ("", "float16"), ()),
        (split(24, 8), ("bfloat16", "float16"), ("trainer.accumulate=2", "trainer.clip_norm=0.5")),
        (split(20, 9, 3), ("", "float16", "bfloat16"), ("trainer.accumulate=3",)),
        (
            split(8, 16, 8),
            ("float16", "", "bfloat16"),
            ("trainer.microbatch_size=8", "trainer.clip_norm=0.5"),
        ),
    ],
    ids=["two", "two-accumulate-clip", "three-accumulate", "three-microbatches-clip"],
)
def test_a_burst_on_one_rank_is_left_out_by_all(
    train: Train, cpus: Cpus, tmp_path: Path, layout: Options, half: tuple[str, ...], options: Options
) -> None:
    cpus(*half)
    passes = 3 if "trainer.accumulate=3" in options else 2 if options else 1
    run = train(
        *BURSTING,
        *COMMON,
        *layout,
        *options,
        "trainer.precision=auto",
        "trainer.max_steps=6",
        f"+model.passes=[{3 * passes}]",  # of step 3, counted from 0
        f"+model.diary={tmp_path}",
    )
    assert precisions(run) == [name or "float32" for name in half]
    assert column(run, "train/skipped_steps") == [0, 0, 0, 1, 1, 1]
    assert column(run, "train/loss_scale") == [2.0**16] * 3 + [2.0**15] * 3
    assert run.summary["steps"] == 6
    assert run.summary["samples"] == 6 * 32
    of_rank_1 = weights_at_steps(tmp_path / "1.txt", passes)
    changed = [before != after for before, after in zip(of_rank_1, of_rank_1[1:], strict=False)]
    assert changed == [True, True, True, False, True, True]
    for rank in range(len(half)):
        diary = (tmp_path / f"{rank}.txt").read_text().split("\n")
        seen = list(dict.fromkeys(line.split()[1] for line in diary if line))
        assert seen == list(dict.fromkeys(of_rank_1)), rank  # the same weights on all, to the bit, to the end


def test_a_scale_that_a_float32_rank_shares_changes_no_bit(train: Train, cpus: Cpus) -> None:
    """The second rank has no samples: only the scale that it needs for float16 could be seen."""
    options = (
        *MLP,
        *COMMON,
        *split(1, 0),
        "trainer.max_steps=8",
        "trainer.clip_norm=0.5",
        "trainer.accumulate=2",
    )
    plain = train(*options)
    cpus("", "float16")
    scaled = train(*options, "trainer.precision=auto")
    assert precisions(scaled) == ["float32", "float16"]
    assert column(scaled, "train/loss_scale") == [2.0**16] * 8
    assert scaled.losses == plain.losses
    assert column(scaled, "train/grad_norm") == column(plain, "train/grad_norm")
    assert difference(scaled.parameters(), plain.parameters()) == 0.0


def test_a_mixture_of_bfloat16_and_float32_learns_one_model(train: Train, cpus: Cpus, tmp_path: Path) -> None:
    cpus("bfloat16", "")
    options = (*BURSTING, *COMMON, *split(20, 12), "trainer.max_steps=20", "optimizer.lr=0.01")
    run = train(*options, "trainer.precision=auto", f"+model.diary={tmp_path}")
    assert precisions(run) == ["bfloat16", "float32"]
    first, second = (weights_at_steps(tmp_path / f"{rank}.txt") for rank in range(2))
    assert first == second
    assert len(set(first)) == 21
    full = train(*options)
    assert run.losses[-1] < run.losses[0]
    assert run.losses == pytest.approx(full.losses, abs=0.02)
    assert run.losses != full.losses


def test_a_resumed_run_goes_on_with_its_scale(train: Train, cpus: Cpus) -> None:
    cpus("", "float16")
    options = (*BURSTING, *COMMON, *split(24, 8), "trainer.precision=auto")
    first = train(*options, "trainer.max_steps=3", "+model.passes=[0,1]")
    assert column(first, "train/loss_scale") == [2.0**15, 2.0**14, 2.0**14]
    second = train(*options, "trainer.max_steps=6", f"resume={first.folder}")
    assert column(second, "train/loss_scale") == [2.0**14] * 3
    assert column(second, "train/skipped_steps") == [2] * 3


# ---------------------------------------------------------------- no scale to blame


def test_a_diverged_run_ends_and_names_the_device(train: Train, tmp_path: Path) -> None:
    with pytest.raises(RunFailedError) as caught:
        train(
            *BURSTING,
            *COMMON,
            *split(24, 8),
            "trainer.max_steps=50",
            "trainer.checkpoint_every=1",
            "+model.passes=[2]",
            "+model.loss_too=true",
            folder=tmp_path / "run",
        )
    assert caught.value.exit_code == 1
    told = str(caught.value)
    assert "The gradient of step 3 is not finite" in told
    assert "nan on rank 1, cpu:1" in told and "trainer.non_finite=skip" in told
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", told)
    assert {failure["kind"] for failure in summary["failures"]} == {"NonFiniteError"}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 3 and losses[2] != losses[2]  # the loss that ended the run is seen in its curve
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2  # and no broken weights were saved


def test_steps_may_be_left_out_instead(train: Train) -> None:
    run = train(
        *BURSTING,
        *COMMON,
        *split(24, 8),
        "trainer.max_steps=5",
        "trainer.non_finite=skip",
        "+model.passes=[2,3]",
        "+model.loss_too=true",
    )
    assert column(run, "train/skipped_steps") == [0, 0, 1, 2, 2]
    assert [loss == loss for loss in run.losses] == [True, True, False, False, True]
    assert run.screen.count("is not finite") == 1
