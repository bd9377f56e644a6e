"""Samples of any form train as on one device, and what does not fit is one sentence before the training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import Train, difference, worst

from hetexp.core.errors import ConfigError, RunFailedError

STEPS = 8
COMMON = (
    "model=custom",
    "data=custom",
    "data._target_=sampled.Both",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=16",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)
ONE = ("hardware=cpu", "strategy=single")
TWO = ("hardware.devices=[cpu,cpu]", "balancing=manual", "balancing.weights=[11,5]", "trainer.accumulate=2")
FORMS = {
    "dict": ("model._target_=sampled.Net", "+data.form=as_dict", "data.targets=labels"),
    "part": ("model._target_=sampled.Net", "+data.form=as_dict", "data.inputs=x", "data.targets=labels"),
    "positions": ("model._target_=sampled.Net", "+data.form=three", "data.inputs=[0,1]", "data.targets=2"),
    "int32": ("model._target_=sampled.Net", "+data.form=int32"),
    "pad": (
        "model._target_=sampled.Tagger",
        "+data.form=sequence",
        "data.targets=labels",
        "data.collate={_target_: pad, mask: real}",
    ),
    "pad-rows": (
        "model._target_=sampled.Tagger",
        "+data.form=rows",
        "data.targets=labels",
        "data.collate={_target_: pad, mask: real, mask_type: bool, length: 9}",
    ),
    "list": (
        "model._target_=sampled.Detector",
        "+data.form=boxes",
        "data.collate=list",
        "trainer.loss=sampled.ByBox",
    ),
    "list-own-loss": (
        "model._target_=sampled.BoxLoss",
        "+data.form=named_boxes",
        "data.collate=list",
        "trainer.loss=model",
        "loss.count=samples",
    ),
    "graphs-own-loss": (
        "model._target_=sampled.GraphLoss",
        "+data.form=points",
        "data.collate=sampled.batched_graphs",
        "trainer.loss=model",
        "loss.count=samples",
    ),
    "list-sum": (
        "model._target_=sampled.BoxLoss",
        "+data.form=named_boxes",
        "data.collate=list",
        "trainer.loss=sum",
        "loss.terms={own:{loss:model,count:samples,factor:0.7}}",
    ),
    "pad-other-label": (
        "model._target_=sampled.Tagger",
        "+data.form=sequence",
        "data.targets=labels",
        "data.collate={_target_: pad, mask: real}",
        "loss.ignore_index=-7",
    ),
    "graphs": (
        "model._target_=sampled.GraphNet",
        "+data.form=points",
        "data.collate=sampled.batched_graphs",
        "data.targets=y",
    ),
    "packed": (
        "model._target_=sampled.Recurrent",
        "+data.form=points",
        "data.collate={_target_: sampled.packed, sorted_already: false}",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_form_equals_one_device(train: Train, form: str) -> None:
    reference = train(*COMMON, *FORMS[form], *ONE)
    run = train(*COMMON, *FORMS[form], *TWO)
    loss, parameters = worst(run, reference, STEPS)
    assert loss <= 1e-12
    assert parameters <= 1e-12
    final, expected = run.summary["final"]["eval"], reference.summary["final"]["eval"]
    assert final["samples"] == expected["samples"] == 22
    assert final["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert final.get("accuracy") == expected.get("accuracy")


def test_padding_follows_the_label_that_does_not_count(train: Train) -> None:
    usual, other = train(*COMMON, *FORMS["pad"], *ONE), train(*COMMON, *FORMS["pad-other-label"], *ONE)
    assert worst(other, usual, STEPS) == (0.0, 0.0)


def test_a_wrong_label_of_the_evaluation_is_one_sentence(train: Train) -> None:
    options = (
        "model._target_=sampled.OwnLoss",
        "data._target_=sampled.wrong_evaluation",
        "trainer.loss=model",
    )
    with pytest.raises(RunFailedError, match=r"labels must be from 0 to 2.* is 5 instead") as caught:
        train(*COMMON, *options, *TWO)
    assert "Traceback" not in str(caught.value)


def test_dicts_equal_pairs(train: Train) -> None:
    pairs = train(*COMMON, "model._target_=sampled.Net", "+data.form=pair", *ONE)
    for form in ("dict", "part", "positions", "int32"):
        assert worst(train(*COMMON, *FORMS[form], *ONE), pairs, STEPS) == (0.0, 0.0)


LOCAL = ("strategy=local_sgd", "strategy.sync_every=2", "trainer.checkpoint_every=2")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("form", ["list", "list-own-loss", "graphs", "pad"])
@pytest.mark.parametrize("ways", [LOCAL, ("balancing=profiled",)], ids=["local_sgd", "profiled"])
def test_each_way_of_drawing_samples_takes_them(
    train: Train, form: str, ways: tuple[str, ...], workers: int
) -> None:
    """Local steps cut a rank's microbatches again, and a calibration cuts them to many sizes."""
    devices = ("hardware.devices=[cpu,cpu]", f"trainer.num_workers={workers}")
    run = train(*COMMON, *FORMS[form], *ways, *devices)
    assert run.summary["steps"] == STEPS
    assert run.summary["final"]["eval"]["samples"] == 22


def test_local_steps_cut_lists_into_samples(train: Train) -> None:
    """The sum over images does not depend on how a local step's samples are cut."""
    options = (*COMMON, *FORMS["list"], *LOCAL, "optimizer=sgd", *TWO)
    cut, whole = train(*options), train(*options, "trainer.accumulate=1")
    assert cut.losses == pytest.approx(whole.losses, rel=1e-12)
    assert difference(cut.parameters(), whole.parameters()) <= 1e-12


@pytest.mark.parametrize(
    ("model", "form", "words"),
    [
        ("Net", "as_dict", r"`data\.targets` must be .*\(x, labels\), but is null"),
        ("Tagger", "sequence data.targets=labels", r"must be pad.*`ids` are \[3\] int64 and \[4\]"),
        ("Tagger", "sequence data.targets=lables data.collate=pad", r"`data\.targets`.*mean `labels`"),
        (
            "Net",
            "as_dict data.inputs=[y] data.targets=labels",
            r"`data\.inputs` must be a key .*\(x, labels\)",
        ),
        ("Net", "three", r"`data\.targets` must be the position"),
        ("Tagger", "pair", r"Tagger\.forward\(ids.*fails with \[2, 8\] float64.*sampled\.py, line"),
        ("Tagger", "as_dict data.targets=labels", r"`data\.inputs` must be .*\(ids.*\{x: \[2, 8\] float64\}"),
        ("Net", "one_hot", r"\[2, 3\] and \[2, 3\]\. One-hot labels become classes"),
        ("Net", "from_one_on", r"labels must be from 0 to 2.*training sample 1 is 3"),
        ("Net", "late", r"labels must be from 0 to 2.*training sample 41 is 5"),
        ("OwnLoss", "own_late", r"labels must be from 0 to 2.*training sample 41 is 5"),
        ("OwnLoss", "own_wrong", r"labels must be from 0 to 2.*training sample 1 is 3"),
        (
            "Tagger",
            "unknown_token data.targets=labels data.collate=pad",
            r"tokens must be from 0 to 7.*sample 1 is",
        ),
        (
            "Asserting",
            "own_late",
            r"assertion .*in step \d.*samples .*41.*with labels from \d to 5.*probable cause",
        ),
        ("Detector", "boxes data.collate=pad", r"`data\.collate` pad needs samples whose inputs"),
    ],
)
def test_what_does_not_fit_is_one_sentence(train: Train, model: str, form: str, words: str) -> None:
    name, *more = form.split()
    more += ["trainer.loss=model"] if name.startswith("own_") else []
    options = (f"model._target_=sampled.{model}", f"+data.form={name}", *more)
    with pytest.raises(RunFailedError, match=words) as caught:
        train(*COMMON, *options, *TWO)
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert ("at step" in str(caught.value)) == name.endswith("late")


THREE = ("hardware.devices=[cpu,cpu,cpu]", "balancing=manual", "balancing.weights=[5,2,1]")


@pytest.mark.parametrize(
    ("model", "form", "words"),
    [
        ("Net", "broken", r"`data` must give its first samples, .*no file for sample 0 \(sampled\.py, line"),
        ("Tagger", "sequence data.targets=labels", r"`data\.collate` must be pad"),
        ("Net", "points data.collate=sampled.stacked", r"`data\.collate` must make .*\[2, 4\] float64"),
        ("Tagger", "pair", r"Tagger\.forward\(ids.*fails with \[2, 8\] float64"),
        ("Net", "one_hot", r"\[2, 3\] and \[2, 3\]\. One-hot labels become classes"),
    ],
)
def test_one_rank_tells_and_the_others_end(
    train: Train, tmp_path: Path, model: str, form: str, words: str
) -> None:
    name, *more = form.split()
    options = (f"model._target_=sampled.{model}", f"+data.form={name}", *more)
    with pytest.raises(RunFailedError, match=words) as caught:
        train(*COMMON, *options, *THREE, folder=tmp_path / "run")
    assert caught.value.exit_code == 1
    assert len(str(caught.value).splitlines()) == 1
    screen = caught.value.screen  # type: ignore[attr-defined]
    assert "Traceback" not in screen and "Followed by" not in screen
    assert screen.count(str(caught.value).partition("error: ")[2]) == 1
    assert "Traceback" in (tmp_path / "run/logs/rank_0.traceback").read_text()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [failure["device"] for failure in summary["failures"]] == ["cpu:0"]
    for rank in (1, 2):
        log = (tmp_path / f"run/logs/rank_{rank}.log").read_text()
        assert "rank 0 (cpu:0) cannot start" in log and "Traceback" not in log
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_an_error_of_one_rank_ends_the_others(train: Train, tmp_path: Path) -> None:
    """Rank 0 tries the samples, which are good there."""
    data = ("data._target_=faulty.Data", "+data.fault=raise", "+data.after=-1")
    options = ("model=mlp", "model.hidden_sizes=[4]", *data)
    with pytest.raises(RunFailedError, match="rank 1, cpu:1 .*this sample is broken") as caught:
        train(*COMMON, *options, *THREE, folder=tmp_path / "run")
    assert "Followed by" not in caught.value.screen  # type: ignore[attr-defined]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [failure["device"] for failure in summary["failures"]] == ["cpu:1"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("model._target_=sampled.Counting", "+data.form=pair"), id="model"),
        pytest.param(
            ("model._target_=sampled.Net", "+data.form=pair", "trainer.loss=sampled.CountingLoss"), id="loss"
        ),
        pytest.param(
            ("model._target_=sampled.Tagger", "+data.form=square", "data.targets=labels", "data.collate=pad"),
            id="classes",
        ),
    ],
)
def test_all_ranks_train_as_if_each_had_tried(train: Train, options: tuple[str, ...]) -> None:
    """The trial counts as no call, and every rank knows where the classes stand in an output."""
    reference = train(*COMMON, *options, *ONE)
    run = train(*COMMON, *options, *THREE)
    assert max(worst(run, reference, STEPS)) <= 1e-12


def test_samples_of_later_steps_that_do_not_stack_are_one_sentence(train: Train) -> None:
    for workers in (0, 1):
        with pytest.raises(RunFailedError, match=r"`data\.collate` must be pad") as caught:
            train(
                *COMMON,
                *FORMS["list"][:2],
                "data._target_=sampled.only_train",
                f"trainer.num_workers={workers}",
                "trainer.loss=sampled.ByBox",
                "hardware=cpu",
                "strategy=single",
            )
        assert "Traceback" not in str(caught.value)


def test_a_mask_that_the_model_does_not_use_is_warned_of(train: Train) -> None:
    def log(folder: Path) -> str:
        return (folder / "logs/rank_0.log").read_text()

    masked = train(*COMMON, *FORMS["pad"], *TWO)
    assert "padding changes the loss" not in log(masked.folder)
    blind = train(*COMMON, *FORMS["pad"], "+model.uses_mask=false", *TWO)
    assert "padding changes the loss" in log(blind.folder)


GPT = (
    *("model=gpt", "model.num_layers=2", "model.num_heads=2", "model.embedding_size=8"),
    *("model.vocab_size=11", "model.sequence_length=9", "+data.form=tokens"),
)
ONE_SHAPE = {
    "pipeline": ("hardware.devices=[cpu,cpu]", "strategy=pipeline"),
    "emulated": ("hardware.devices=[emulated:rtx_3090,emulated:t4]", "trainer.precision=float32"),
}


@pytest.mark.parametrize("layout", ONE_SHAPE)
def test_pipelines_and_emulated_devices_need_one_shape(train: Train, layout: str) -> None:
    for collate, words in (
        ("pad", r"`data\.collate\.length` must be given"),
        ("sampled.stacked", r"`data\.collate` must be null, pad with a length"),
    ):
        with pytest.raises((RunFailedError, ConfigError), match=words):
            train(*COMMON, *GPT, *ONE_SHAPE[layout], f"data.collate={collate}")


def test_a_pipeline_trains_on_sequences_padded_to_one_length(train: Train) -> None:
    options = (*COMMON, *GPT, "data.collate={_target_: pad, length: 9}")
    reference = train(*options, *ONE)
    assert max(worst(train(*options, *ONE_SHAPE["pipeline"]), reference, STEPS)) <= 1e-12
    # Causal layers do not see the padding, and its targets do not count.
    assert max(worst(train(*options, "data.collate=pad", *TWO), reference, STEPS)) <= 1e-12


def test_a_part_of_the_samples_may_be_for_evaluation(train: Train) -> None:
    """The part follows `trainer.seed`, and is the same on every device."""
    options = (*COMMON, "data._target_=sampled.only_train", *FORMS["dict"], "data.evaluation=0.2")
    one, two = train(*options, *ONE), train(*options, *TWO)
    assert one.summary["final"]["eval"]["samples"] == 12
    expected = one.summary["final"]["eval"]["loss"]
    assert two.summary["final"]["eval"]["loss"] == pytest.approx(expected, rel=1e-12)
    other = train(*options, *ONE, "trainer.seed=3")
    assert other.summary["final"]["eval"] != one.summary["final"]["eval"]
