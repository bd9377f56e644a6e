"""A model's own loss, and sums of losses, on unequal devices equal plain torch on one, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import returning
import torch
from support import difference, start_run, worst
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from hetexp.core.errors import ConfigError, RunFailedError
from hetexp.data.sampler import GlobalSampler, Position

STEPS, BATCH, SEED = 6, 16, 4
SHARES = ("hardware.devices=[cpu,cpu,cpu]", "balancing=manual", "balancing.weights=[10,5,1]")
COMMON = (
    *("model=custom", "data=custom", "optimizer=sgd", "optimizer.lr=0.2", "optimizer.momentum=0.9"),
    *(f"trainer.global_batch_size={BATCH}", f"trainer.max_steps={STEPS}", "trainer.max_epochs=null"),
    *(
        f"trainer.seed={SEED}",
        "trainer.precision=float64",
        "trainer.log_every=1",
        "trainer.checkpoint_every=1",
    ),
)
Loss = Callable[[Any, Any, Any], torch.Tensor]


def plain(model: nn.Module, data: returning.Split, loss_of: Loss) -> Iterator[tuple[float, dict[str, Any]]]:
    """Train in this process without hetexp, and yield each step's loss and weights."""
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    sampler, position = GlobalSampler(returning.SAMPLES, BATCH, SEED), Position()
    for _ in range(STEPS):
        indices, position = sampler.batch(position)
        inputs, targets = default_collate([data.train[index] for index in indices.tolist()])
        loss = loss_of(model(**inputs), inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach()), {k: v.detach().clone() for k, v in model.state_dict().items()}


def evaluated(model: nn.Module, data: returning.Split, loss_of: Loss) -> float:
    inputs, targets = default_collate([data.train[index] for index in range(returning.SAMPLES)])
    with torch.no_grad():
        return float(loss_of(model(**inputs), inputs, targets))


def losses_of(output: Any, inputs: Any, targets: Any) -> torch.Tensor:
    """Return what the configured sum of `Heads` is."""
    kind = functional.cross_entropy(output["kind"], targets["kind"], torch.tensor([0.5, 1.7, 1.1]).double())
    box = functional.huber_loss(output["box"], targets["box"], delta=0.5)
    words = functional.cross_entropy(output["words"], targets["words"], label_smoothing=0.1)
    return kind + 2.5 * box + 0.7 * words


TERMS = (
    "loss.terms={kind:{loss:cross_entropy,weight:[0.5,1.7000000476837158,1.100000023841858],output:kind,target:kind},"
    "box:{loss:huber,factor:2.5,delta:0.5,output:box,target:box},"
    "words:{loss:cross_entropy,factor:0.7,label_smoothing:0.1,class_dim:1,output:words,target:words}}"
)
CASES: dict[str, tuple[Any, str, Any, str, tuple[str, ...], Loss]] = {
    "gpt2": (
        *(returning.gpt2, "gpt2", returning.tokens, "tokens"),
        ("trainer.loss=model", "loss.count=shifted_labels"),
        lambda output, inputs, targets: output.loss,
    ),
    "bert": (
        *(returning.bert, "bert", returning.texts, "texts"),
        ("trainer.loss=model",),
        lambda output, inputs, targets: output.loss,
    ),
    "bare": (
        *(returning.Bare, "Bare", returning.numbers, "numbers"),
        ("trainer.loss=model", "loss.count=returning.count_words"),
        lambda output, inputs, targets: output[0],
    ),
    "labels": (
        *(returning.Bare, "Bare", returning.numbers, "numbers"),
        ("trainer.loss=model", "loss.count=labels", "loss.target=words", "trainer.accumulate=3"),
        lambda output, inputs, targets: output[0],
    ),
    "bert-logits": (
        *(returning.bert, "bert", returning.texts, "texts"),
        ("loss.label_smoothing=0.2",),
        lambda output, inputs, targets: functional.cross_entropy(output.logits, targets, label_smoothing=0.2),
    ),
    "sum": (
        *(returning.Heads, "Heads", returning.numbers, "numbers"),
        ("trainer.loss=sum", TERMS, "trainer.accumulate=2"),
        losses_of,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_plain_torch(tmp_path: Path, case: str) -> None:
    make, model_name, data_of, data_name, options, loss_of = CASES[case]
    names = (f"model._target_=returning.{model_name}", f"data._target_=returning.{data_name}")
    run = start_run(tmp_path / "run", (*COMMON, *names, *SHARES, *options))
    model, data = make(), data_of()
    reference = list(plain(model, data, loss_of))
    for step, (loss, weights) in enumerate(reference, 1):
        found = run.losses[step - 1]
        if math.isnan(loss):
            assert found is None
        else:
            assert found == pytest.approx(loss, rel=1e-12)
        saved = run.parameters(step)  # a tied weight once
        assert difference(saved, {name: weights[name] for name in saved}) <= 1e-12
    found = run.summary["final"]["eval"]["loss"]
    assert found == pytest.approx(evaluated(model, data, loss_of), rel=1e-12)


def test_a_model_that_returns_no_loss_in_evaluation(tmp_path: Path) -> None:
    """As torchvision's detectors: the training goes on, one warning says so, and nothing is reported."""
    names = ("model._target_=returning.Detector", "data._target_=returning.numbers")
    options = ("trainer.loss=model", "loss.count=samples", "trainer.eval_every=2")
    run = start_run(tmp_path / "run", (*COMMON, *names, *SHARES, *options))
    reference = plain(returning.Detector(), returning.numbers(), lambda losses, *_: sum(losses.values()))
    for step, (loss, weights) in enumerate(reference, 1):
        assert run.losses[step - 1] == pytest.approx(loss, rel=1e-12)
        found = run.parameters(step)
        assert difference(found, {name: weights[name] for name in found}) <= 1e-12
    assert run.summary["final"]["eval"] == {"samples": returning.SAMPLES}
    log = (run.folder / "logs" / "rank_0.log").read_text()
    assert log.count("The evaluation reports no loss") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("data._target_=returning.tokens", "model._target_=returning.gpt2"),
            r"`loss\.count` must be one of samples",
        ),
        (("data._target_=returning.numbers", "model._target_=returning.Heads"), r"hold no tensor `labels`"),
        (
            ("data._target_=returning.numbers", "model._target_=returning.Heads", "loss.count=samples"),
            r"needs a model that returns its loss",
        ),
    ],
)
def test_a_count_in_doubt_is_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(RunFailedError, match=message):
        start_run(tmp_path / "run", (*COMMON, *SHARES, "trainer.loss=model", *options))


@pytest.mark.parametrize(
    "strategy",
    [
        ("strategy=pipeline", "hardware.devices=[cpu,cpu]"),
        ("strategy=ddp", *SHARES, "debug.normalizer=per_rank"),
    ],
)
def test_the_terms_of_a_sum_in_other_strategies(tmp_path: Path, strategy: tuple[str, ...]) -> None:
    """A cut model equals one device; means of each rank alone do not, as their counts differ."""
    terms = "loss.terms={a:{loss:cross_entropy},b:{loss:cross_entropy,factor:0.5,weight:[0.1,0.7,3.0]}}"
    options = (
        *(
            "data=synthetic",
            "data.num_samples=42",
            "data.num_classes=3",
            "model=mlp",
            "model.hidden_sizes=[6,6]",
        ),
        *("trainer.loss=sum", terms, *(word for word in COMMON if "custom" not in word)),
    )
    run = start_run(tmp_path / "run", (*options, *strategy))
    alone = start_run(tmp_path / "alone", (*options, "strategy=single", "hardware=cpu"))
    worst_loss, worst_weights = worst(run, alone, STEPS)
    if strategy[0] == "strategy=pipeline":
        assert worst_loss <= 1e-12 and worst_weights <= 1e-12
        found, expected = (one.summary["final"]["eval"]["loss"] for one in (run, alone))
        assert found == pytest.approx(expected, rel=1e-12)
    else:
        assert worst_weights > 1e-6


def test_a_cut_model_has_no_loss_of_its_own(tmp_path: Path) -> None:
    options = ("model=mlp", "data=synthetic", "strategy=pipeline", "hardware.devices=[cpu,cpu]")
    with pytest.raises(ConfigError, match=r"`trainer\.loss` must be another loss where the model is cut"):
        start_run(tmp_path / "run", (*options, "trainer.loss=model"))
