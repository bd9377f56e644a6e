"""The shipped losses with all their arguments: any unequal cut adds up to torch's own mean, in float64."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hetexp.core.errors import ConfigError
from hetexp.training.loss import (
    IndicesChecked,
    LabelError,
    Loss,
    TokenError,
    WeightedSum,
    batch_counts,
    build_loss,
)

CUTS = ((0, 1), (1, 8), (8, 8), (8, 11))
"""Unequal parts of 11 samples, one of them empty."""
WEIGHT = [0.5, 1.7, 0.0, 1.1]
Inception = namedtuple("Inception", "logits aux_logits")


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(seed: int, classes: int, *shape: int) -> torch.Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def assert_adds_up(loss: Loss, output: torch.Tensor, targets: torch.Tensor, mean: torch.Tensor) -> None:
    """Compare the parts' sums over their counts with the mean, and their gradients with the mean's."""
    (expected,) = torch.autograd.grad(mean, output, retain_graph=True)
    totals = [loss.total(output[a:b], targets[a:b]) for a, b in CUTS]
    count = sum(loss.count(targets[a:b]) for a, b in CUTS)
    assert loss.counts(targets).sum() == pytest.approx(count, rel=1e-14)
    whole = torch.stack(totals).sum() / count
    torch.testing.assert_close(whole, mean, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(whole, output)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignored", [-100, 3, 255])
@pytest.mark.parametrize("shape", [(11, 4), (11, 4, 5), (11, 4, 3, 2), (11, 5, 4)])
def test_cross_entropy_is_torchs(
    weight: list[float] | None, smoothing: float, ignored: int, shape: tuple[int, ...]
) -> None:
    last = shape[-1] == 4
    rest = shape[1:-1] if last else shape[2:]
    output, targets = draw(0, *shape).requires_grad_(), labels(1, 4, 11, *rest)
    targets[labels(2, 3, 11, *rest) == 0] = ignored
    arguments = {"weight": weight, "label_smoothing": smoothing, "ignore_index": ignored}
    mean = functional.cross_entropy(
        output.movedim(-1, 1) if last and rest else output,
        targets,
        None if weight is None else torch.tensor(weight, dtype=torch.float64),
        ignore_index=ignored,
        label_smoothing=smoothing,
    )
    loss = build_loss("cross_entropy", arguments)
    assert_adds_up(loss, output, targets, mean)
    given = build_loss("cross_entropy", {**arguments, "class_dim": -1 if last else 1})
    assert_adds_up(given, output, targets, mean)
    right = (output.argmax(-1 if last else 1) == targets) & (targets != ignored)
    weights = (
        torch.ones(4, dtype=torch.float64) if weight is None else torch.tensor(weight, dtype=torch.float64)
    )
    assert loss.correct(output, targets) == pytest.approx(float(weights[targets[right]].sum()))


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(("shape", "dim"), [((11, 4), None), ((11, 4, 5), 1), ((11, 5, 4), -1)])
def test_probabilities_of_classes_are_targets(
    weight: list[float] | None, smoothing: float, shape: tuple[int, ...], dim: int | None
) -> None:
    at = 1 if dim is None else dim
    output, targets = draw(0, *shape).requires_grad_(), draw(1, *shape).softmax(at)
    mean = functional.cross_entropy(
        output.movedim(at, 1),
        targets.movedim(at, 1),
        None if weight is None else torch.tensor(weight, dtype=torch.float64),
        label_smoothing=smoothing,
    )
    arguments = {"weight": weight, "label_smoothing": smoothing, "class_dim": dim}
    assert_adds_up(build_loss("cross_entropy", arguments), output, targets, mean)


def test_numbers_that_are_no_probabilities_are_refused() -> None:
    loss = build_loss("cross_entropy")
    for targets in (draw(0, 5, 3), torch.ones(5, 3), draw(0, 5)):
        with pytest.raises(ConfigError, match="needs classes, but the targets are numbers"):
            loss.count(targets)
    with pytest.raises(ConfigError, match=r"`loss\.class_dim` must be the dimension of the classes"):
        loss.count(draw(0, 5, 3, 2).softmax(1))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.bool])
def test_labels_of_any_integer_type(dtype: torch.dtype) -> None:
    loss, output, targets = build_loss("cross_entropy"), draw(0, 11, 160), labels(1, 2, 11)
    targets[3] = 156 if dtype is torch.uint8 else 1  # -100 as a byte, which is a class like any other
    own = targets.to(dtype)
    assert (loss.count(own), loss.total(output, own)) == (11, loss.total(output, targets))
    weighted = build_loss("cross_entropy", {"weight": [2.0] * 160})
    assert (weighted.count(own), weighted.counts(own).tolist()) == (22.0, [2.0] * 11)


@pytest.mark.parametrize("shape", [(5, 3, 3), (5, 4, 4), (5, 6, 6, 6)])
def test_a_doubt_about_the_classes_is_refused(shape: tuple[int, ...]) -> None:
    output, targets = draw(0, *shape), labels(0, 3, *shape[:-1])
    with pytest.raises(ConfigError, match=r"`loss\.class_dim` must be -1 \(the last\) or 1, but is null"):
        build_loss("cross_entropy").total(output, targets)
    last, first = (build_loss("cross_entropy", {"class_dim": dim}).total(output, targets) for dim in (-1, 1))
    assert first == functional.cross_entropy(output, targets, reduction="sum")
    assert last == functional.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("dim", [0, 2, -4, 7, -9])
def test_a_dimension_that_is_not_of_the_classes_is_refused(dim: int) -> None:
    loss = build_loss("cross_entropy", {"class_dim": dim})
    with pytest.raises(ConfigError, match=r"`loss\.class_dim` must be a dimension"):
        loss.total(draw(0, 5, 3, 2, 7), labels(0, 3, 5, 2, 7))


def test_one_hot_labels_are_spoken_of() -> None:
    """Case 65."""
    with pytest.raises(ConfigError, match=r"one label for each .*\[5, 3\] and \[5, 3\].*argmax.*float\(\)"):
        build_loss("cross_entropy").total(draw(0, 5, 3), functional.one_hot(labels(0, 3, 5), 3))


def test_a_single_class_is_refused() -> None:
    """The loss of the only class is 0, whatever the labels are."""
    for shape, targets in (((5, 1), (5,)), ((5, 1, 4, 4), (5, 4, 4))):
        with pytest.raises(ConfigError, match=r"two classes or more.*bce"):
            build_loss("cross_entropy").total(draw(0, *shape), torch.zeros(targets, dtype=torch.int64))


@pytest.mark.parametrize("known", [None, 5])
def test_a_models_loss_counts_samples_by_rows_or_by_their_number(known: int | None) -> None:
    """Lists have no rows: the first tensor of an image has three colours."""
    targets = [{"boxes": torch.zeros(3, 4)}, {"boxes": torch.zeros(1, 4)}]
    whole = build_loss("model", {"count": "samples"}).for_samples(known)
    assert whole.count(targets) == (known or 3)
    assert float(whole.total((torch.tensor(2.0),), targets)) == 2 * (known or 3)
    assert whole.counts(targets).tolist() == [1] * (known or 3)
    terms = {"own": {"loss": "model", "count": "samples", "factor": 0.5}}
    several = build_loss("sum", {"terms": terms}).for_samples(known)
    assert batch_counts(several, [targets], [known]) == (known or 3, [known or 3])


def test_a_loss_that_does_not_count_samples_stays_itself() -> None:
    for loss in (build_loss("cross_entropy"), build_loss("mse"), build_loss("model", {"count": "labels"})):
        assert loss.for_samples(5) is loss


def test_indices_that_a_model_hands_to_torch_are_checked() -> None:
    scores, words = torch.zeros(2, 3), torch.zeros(4, 6)
    with IndicesChecked():
        functional.cross_entropy(scores, torch.tensor([2, -100]))
        functional.cross_entropy(scores, torch.full((2, 3), 1 / 3))
        functional.nll_loss(scores, torch.tensor([2, 9]), ignore_index=9)
        functional.embedding(torch.tensor([[3]]), words)
        nn.Linear(3, 2)(scores)
        with pytest.raises(LabelError, match=r"from 0 to 2, .* or -1 if .* but one is -100 instead"):
            nn.CrossEntropyLoss(ignore_index=-1)(scores, torch.tensor([2, -100]))
        with pytest.raises(TokenError, match=r"from 0 to 3, .* but one is 4 instead"):
            functional.embedding(torch.tensor([[4]]), words)
        with pytest.raises(LabelError, match=r"one is 3 instead"):  # a dimension of pixels
            functional.cross_entropy(torch.zeros(2, 3, 4), torch.full((2, 4), 3))


@pytest.mark.parametrize("arguments", [{}, {"weight": [1.0, 1.0, 1.0]}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("wrong", [3, -1])
def test_labels_out_of_range_are_named(arguments: dict[str, Any], wrong: int) -> None:
    """Case 66: on the CPU by the pass itself, elsewhere before the device fails of them."""
    loss, output, targets = build_loss("cross_entropy", arguments), draw(0, 5, 3), labels(0, 3, 5)
    targets[1], targets[2], targets[3] = 0, -100, wrong
    message = rf"labels must be from 0 to 2, .* 3 classes, or -100 .* is {wrong} instead"
    for ask in (loss.total, loss.check):
        with pytest.raises(ConfigError, match=message):
            ask(output, targets)
    if "weight" in arguments:
        with pytest.raises(ConfigError, match=message):
            loss.count(targets)


def test_as_many_weights_as_classes() -> None:
    loss = build_loss("cross_entropy", {"weight": [1.0, 2.0, 3.0]})
    with pytest.raises(ConfigError, match=r"`loss\.weight` must be a list of 2 numbers"):
        loss.total(draw(0, 5, 2), labels(0, 2, 5))


@pytest.mark.parametrize(
    ("name", "arguments", "reference"),
    [
        ("mse", {}, functional.mse_loss),
        ("mae", {}, functional.l1_loss),
        ("huber", {}, functional.huber_loss),
        ("huber", {"delta": 0.3}, lambda o, t: functional.huber_loss(o, t, delta=0.3)),
        ("bce", {}, functional.binary_cross_entropy_with_logits),
    ],
)
@pytest.mark.parametrize("shape", [(11,), (11, 1), (11, 4), (11, 2, 3)])
def test_losses_of_elements_are_torchs(
    name: str, arguments: dict[str, Any], reference: Any, shape: tuple[int, ...]
) -> None:
    output, targets = draw(0, *shape).requires_grad_(), draw(1, *shape).sigmoid()
    assert_adds_up(build_loss(name, arguments), output, targets, reference(output, targets))
    whole = targets.round()
    for dtype in (torch.int64, torch.bool):  # whole numbers are numbers, too
        mean = reference(output, whole)
        assert_adds_up(build_loss(name, arguments), output, whole.to(dtype), mean)


@pytest.mark.parametrize("weight", [None, [0.5, 1.7, 0.0]])
@pytest.mark.parametrize("pos_weight", [None, 3.0, [2.0, 0.5, 4.0]])
@pytest.mark.parametrize(("shape", "dim"), [((11, 3), None), ((11, 3, 2, 2), None), ((11, 2, 3), -1)])
def test_weights_of_yes_and_no(weight: Any, pos_weight: Any, shape: tuple[int, ...], dim: int | None) -> None:
    output, targets = draw(0, *shape).requires_grad_(), draw(1, *shape).sigmoid().round()
    at = (1 if dim is None else dim) % len(shape)
    each = [3 if place == at else 1 for place in range(len(shape))]

    def placed(values: Any) -> Any:
        return None if values is None else torch.tensor(values, dtype=torch.float64).expand(3).reshape(each)

    mean = functional.binary_cross_entropy_with_logits(
        output, targets, placed(weight), pos_weight=placed(pos_weight)
    )
    arguments = {"weight": weight, "pos_weight": pos_weight, "class_dim": dim}
    loss = build_loss("bce", arguments)
    assert_adds_up(loss, output, targets, mean)
    assert loss.correct(output, targets) == int(((output > 0) == (targets > 0.5)).sum())


def test_weights_that_fit_nowhere_or_twice_are_refused() -> None:
    loss = build_loss("bce", {"pos_weight": [1.0, 2.0, 3.0]})
    with pytest.raises(ConfigError, match=r"`loss\.pos_weight` must be as many numbers as"):
        loss.total(draw(0, 5, 2), torch.zeros(5, 2))
    with pytest.raises(ConfigError, match=r"`loss\.class_dim` must be -1"):
        loss.total(draw(0, 5, 3, 3), torch.zeros(5, 3, 3))


@pytest.mark.parametrize("wrong", [2.0, -1.0, float("nan")])
def test_targets_that_are_neither_yes_nor_no_are_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="bce needs targets from 0 to 1"):
        build_loss("bce").count(torch.tensor([0.0, 1.0, wrong]))


# ---------------------------------------------------------------- outputs and targets in several parts

LOGITS, OTHER, CLASSES = draw(0, 11, 4), draw(1, 11, 4), labels(3, 4, 11)


@pytest.mark.parametrize(
    "output",
    [
        {"loss": draw(2, 1)[0], "logits": LOGITS, "hidden": OTHER},
        OrderedDict(out=LOGITS, aux=OTHER),
        SimpleNamespace(logits=LOGITS, hidden=OTHER),
        {"anything": LOGITS},
        (LOGITS, draw(1, 2, 11, 7)),
        [LOGITS, None],
        Inception(LOGITS, OTHER),
    ],
)
@pytest.mark.parametrize(
    "targets", [labels(3, 4, 11), {"labels": labels(3, 4, 11), "ids": OTHER}, [labels(3, 4, 11)]]
)
def test_the_output_that_leaves_no_doubt(output: Any, targets: Any) -> None:
    loss = build_loss("cross_entropy")
    expected = functional.cross_entropy(LOGITS, labels(3, 4, 11), reduction="sum")
    assert loss.total(output, targets) == expected
    assert loss.count(targets) == 11
    assert loss.correct(output, targets) == int((LOGITS.argmax(1) == labels(3, 4, 11)).sum())


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ((LOGITS, OTHER), "a number from 0 to 1, but is null"),
        ({"first": LOGITS, "second": OTHER}, "one of first, second, but is null"),
        (SimpleNamespace(first=LOGITS, second=OTHER), "one of first, second, but is null"),
        ("text", "is a str"),
    ],
)
def test_an_output_in_doubt_is_refused(output: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"`loss\.output` must be .*{message}"):
        build_loss("cross_entropy").total(output, labels(3, 4, 11))


def test_a_named_output_and_target() -> None:
    """Case 62, with a loss that is shipped."""
    targets = (draw(5, 11, 4), labels(3, 4, 11))
    loss = build_loss("cross_entropy", {"output": "second", "target": 1})
    expected = functional.cross_entropy(OTHER, targets[1], reduction="sum")
    assert loss.total({"first": LOGITS, "second": OTHER}, targets) == expected
    with pytest.raises(ConfigError, match=r"`loss\.target` must be a number from 0 to 1, but is null"):
        build_loss("mse").count(targets)
    with pytest.raises(ConfigError, match=r"`loss\.output` must be one of first, but is 'second'"):
        loss.total({"first": LOGITS}, targets)


# ---------------------------------------------------------------- sums of losses

TERMS: dict[str, Any] = {
    "words": {
        "loss": "cross_entropy",
        "factor": 0.7,
        "output": "words",
        "target": "words",
        "label_smoothing": 0.1,
    },
    "boxes": {"loss": "huber", "factor": 2.5, "output": "boxes", "target": "boxes", "delta": 0.5},
    "kind": {"loss": "cross_entropy", "output": "kind", "target": "kind", "weight": WEIGHT},
}


def many(samples: int = 11) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return outputs and targets: words of which few count, boxes and a class."""
    words = labels(1, 4, samples, 6)
    words[labels(2, 5, samples, 6) > 0] = -100
    output = {"words": draw(0, samples, 6, 4), "boxes": draw(1, samples, 2), "kind": draw(2, samples, 4)}
    return output, {"words": words, "boxes": draw(3, samples, 2), "kind": labels(4, 4, samples)}


def reference(output: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
    words = functional.cross_entropy(
        output["words"].flatten(0, 1), targets["words"].flatten(), label_smoothing=0.1
    )
    boxes = functional.huber_loss(output["boxes"], targets["boxes"], delta=0.5)
    weight = torch.tensor(WEIGHT, dtype=torch.float64)
    return 0.7 * words + 2.5 * boxes + functional.cross_entropy(output["kind"], targets["kind"], weight)


def test_a_sum_of_means_over_different_counts() -> None:
    loss = build_loss("sum", {"terms": TERMS})
    assert isinstance(loss, WeightedSum)
    output, targets = many()
    leaves = {name: value.requires_grad_() for name, value in output.items()}
    expected = torch.autograd.grad(reference(output, targets), list(leaves.values()))
    parts = [
        ({k: v[a:b] for k, v in output.items()}, {k: v[a:b] for k, v in targets.items()}) for a, b in CUTS
    ]
    count, terms = batch_counts(loss, [part for _, part in parts], [None] * len(parts))
    assert count == 11 and terms[1] == 22
    loss.set_global_counts(count, terms)
    total = torch.stack([loss.total(*part) for part in parts]).sum() / count
    torch.testing.assert_close(total, reference(output, targets), rtol=1e-12, atol=0)
    for gradient, wanted in zip(torch.autograd.grad(total, list(leaves.values())), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)
    sums = [sum(values) for values in zip(*(loss.sums(*part) for part in parts), strict=True)]
    assert loss.mean(sums, count, terms) == pytest.approx(float(total.detach()), rel=1e-12)


def test_a_sum_by_itself_takes_each_batchs_own_means() -> None:
    loss = build_loss("sum", {"terms": TERMS})
    output, targets = many()
    assert float(loss.total(output, targets) / loss.count(targets)) == pytest.approx(
        float(reference(output, targets)), rel=1e-12
    )
