"""The form of samples, and the functions that make batches of them."""

from __future__ import annotations

import re
from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from sampled import Graphs, batched_graphs, packed
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, TensorDataset

from hetexp.core.config import LossConfig
from hetexp.core.errors import ConfigError
from hetexp.core.split import Split
from hetexp.data.base import build_data, check_samples, in_torch
from hetexp.data.collate import Pad, collate_list
from hetexp.data.loader import local_batches
from hetexp.data.page_locked import on_device
from hetexp.data.sampler import GlobalSampler, Position
from hetexp.data.samples import Collate, Microbatch, build_function
from hetexp.training.recovery.oom_recovery import part_of, sizes_of, split_microbatches
from hetexp.training.seeding import seeded

DICT = {"x": 1, "mask": 2, "labels": 3}


@pytest.mark.parametrize(
    ("inputs", "targets", "batch", "expected"),
    [
        (None, None, (1, 2), (1, 2)),
        (None, None, [1, 2], (1, 2)),
        (None, None, (1,), (1, 1)),
        (None, None, DICT, (DICT, DICT)),
        (None, None, UserDict(DICT), (DICT, DICT)),
        (None, "labels", DICT, ({"x": 1, "mask": 2}, 3)),
        ("x", "labels", DICT, (1, 3)),
        (["x"], "labels", DICT, ({"x": 1}, 3)),
        (["x", "mask"], None, DICT, ({"x": 1, "mask": 2}, 3)),
        (["x"], None, DICT, ({"x": 1}, {"mask": 2, "labels": 3})),
        ("x", "x", DICT, (1, 1)),
        (None, ["mask", "labels"], DICT, ({"x": 1}, {"mask": 2, "labels": 3})),
        (None, 2, (7, 8, 9), ((7, 8), 9)),
        (0, 2, (7, 8, 9), (7, 9)),
        ([0, 1], [2], (7, 8, 9), ((7, 8), (9,))),
        (None, "real", 3 + 4j, (3 + 4j, 4 - 1)),
        (["real", "imag"], None, 3 + 4j, ({"real": 3, "imag": 4}, 3 + 4j)),
    ],
)
def test_the_parts_of_a_batch(inputs: Any, targets: Any, batch: Any, expected: Any) -> None:
    assert Collate(inputs=inputs, targets=targets).pair(batch) == expected


@pytest.mark.parametrize(
    ("inputs", "targets", "batch", "words"),
    [
        (None, None, (1, 2, 3), r"`data\.targets` must be the position of the targets in samples of 3 parts"),
        (None, "lable", {"label": 1}, r"`data\.targets` must be a key .*\(label\).*mean `label`"),
        ("y", "labels", DICT, r"`data\.inputs` must be a key of the samples \(x, mask, labels\), but is 'y'"),
        (None, 3, (1, 2), r"`data\.targets` must be the position of one of the 2 parts"),
        (None, "labels", (1, 2), r"`data\.targets` must be a position from 0 to 1"),
        (None, "labels", 3 + 4j, r"`data\.targets` must be an attribute of the batch, a builtins\.complex"),
    ],
)
def test_keys_that_are_none_of_a_batch(inputs: Any, targets: Any, batch: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Collate(inputs=inputs, targets=targets).pair(batch)


# ---------------------------------------------------------------- pad and list


def test_pad_fills_inputs_with_zeros_and_classes_with_what_does_not_count() -> None:
    samples = [
        {"ids": torch.tensor([1, 2, 3]), "labels": [4, 5, 6], "n": 1},
        {"ids": [7], "labels": [8], "n": 2},
    ]
    batch = Pad(mask="real")(samples)
    assert batch["ids"].tolist() == [[1, 2, 3], [7, 0, 0]]
    assert batch["labels"].tolist() == [[4, 5, 6], [8, -100, -100]]
    assert batch["real"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["n"].tolist() == [1, 2]
    assert Pad(mask="real", mask_type="bool")(samples)["real"].dtype == torch.bool


def test_pad_takes_pairs_arrays_and_longer_rows() -> None:
    pairs = [(np.ones((n, 2), np.float32), torch.arange(n)) for n in (1, 3)]
    inputs, targets = Pad(values={"0": 5.0}, length=4)(pairs)
    assert inputs.shape == (2, 4, 2)
    assert inputs[0, :, 0].tolist() == [1, 5, 5, 5]
    assert targets.tolist() == [[0, -100, -100, -100], [0, 1, 2, -100]]


def test_pad_follows_the_name_of_the_targets_and_keys() -> None:
    samples = [
        {"ids": [1, 2], "tags": [3, 4], "box": [0.5, 1.5]},
        {"ids": [1], "tags": [3], "box": [2.5, 3.5]},
    ]
    inputs, targets = Collate(Pad(length=3, keys=["ids", "tags"]), targets="tags")(samples)
    assert targets.tolist() == [[3, 4, -100], [3, -100, -100]]
    assert inputs["box"].shape == (2, 2)


def test_pad_fills_classes_with_the_label_that_the_loss_leaves_out() -> None:
    samples = [([1, 2], [3, 4]), ([1], [3])]
    _, targets = Collate(Pad(), ignored=(-7,))(samples)
    assert targets.tolist() == [[3, 4], [3, -7]]
    _, targets = Collate(Pad(values={"1": -5}), ignored=(-7,))(samples)
    assert targets.tolist() == [[3, 4], [3, -5]]
    with pytest.raises(ConfigError, match=r"values\.1` must be given if the terms .* \(-7, -100\)"):
        Collate(Pad(), ignored=(-7, -100))(samples)


def test_the_labels_that_a_loss_leaves_out() -> None:
    terms: dict[str, dict[str, Any]] = {
        "a": {"loss": "cross_entropy", "ignore_index": -7},
        "b": {"loss": "mse"},
    }
    assert LossConfig().ignored() == ()
    assert LossConfig(ignore_index=0).ignored() == (0,)
    assert LossConfig(terms=terms).ignored() == (-7,)
    assert LossConfig(terms={**terms, "c": {"loss": "cross_entropy"}}).ignored() == (-7, -100)


@pytest.mark.parametrize(
    ("arguments", "samples", "words"),
    [
        ({"length": 2}, [{"ids": [1, 2, 3]}], r"`data\.collate\.length` must be at least 3"),
        ({}, [([1], [0.5]), ([1], [0.5, 1.5])], r"`data\.collate\.values\.1` must be given"),
        (
            {"mask": "m"},
            [([1], 1), ([1, 2], 1)],
            r"collate\.mask` must be null if inputs have no names",
        ),
        ({"mask": "ids"}, [{"ids": [1]}], r"`data\.collate\.mask` must be a name that samples do not have"),
    ],
)
def test_what_pad_cannot_know(arguments: Any, samples: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Pad(**arguments)(samples)


@pytest.mark.parametrize("seed", range(4))
def test_padding_to_any_length_gives_the_same_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (6,), generator=generator).tolist()
    samples = [{"ids": torch.randint(50, (n,), generator=generator)} for n in lengths]
    batch = Pad(mask="real")(samples)
    for row, mask, sample in zip(batch["ids"], batch["real"], samples, strict=True):
        assert row[mask.bool()].tolist() == sample["ids"].tolist()
        assert int(mask.sum()) == len(sample["ids"])


def test_lists_stay_lists() -> None:
    images = [torch.zeros(3, n, n) for n in (4, 5)]
    assert collate_list([(image, {"n": 1}) for image in images]) == (images, [{"n": 1}, {"n": 1}])
    assert collate_list([{"a": image} for image in images]) == {"a": images}
    assert Collate(collate_list)(images) == (images, images)  # two samples are not a pair


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([{"a": torch.zeros(3)}, {"a": torch.zeros(4)}], r"the `a` are \[3\] float32 and \[4\] float32"),
        ([(torch.zeros(3), 1), (torch.zeros(4), 1)], r"the inputs are \[3\] float32 and \[4\] float32"),
        ([{"a": {"b": [1, 2]}}, {"a": {"b": [1]}}], r"the `b` are a list of 2 and a list of 1"),
        ([{"a": 1}, {"b": 1}], r"keys are \(a\) and \(b\)"),
        ([(object(), 1), (object(), 1)], r"inputs must be tensors.* are a builtins\.object instead"),
        ([{"a": None}, {"a": None}], r"`a` must be tensors.* are a builtins\.NoneType instead"),
    ],
)
def test_samples_that_do_not_stack_are_one_sentence(samples: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Collate()(samples)
    assert len(caught.value.problems) == 1


# ---------------------------------------------------------------- cutting


class Sequences(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 + index % 3, 4), float(index)), index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("function", [collate_list, packed, batched_graphs])
def test_batches_without_rows_are_cut_by_their_samples(function: Any, workers: int) -> None:
    collate = Collate(function)
    sampler = GlobalSampler(20, 10, 0)
    loaded = local_batches(
        Sequences(),
        sampler,
        Position(),
        2,
        lambda _, n: Split((n,)),
        0,
        2,
        num_workers=workers,
        collate=collate,
    )
    batches = list(loaded)
    for batch in batches:
        assert sizes_of(batch.microbatches) == [5, 5]
        for microbatch, indices in zip(batch.microbatches, batch.indices, strict=True):
            assert isinstance(microbatch, Microbatch)
            part = part_of(microbatch, 1, 3)
            expected = collate([Sequences()[index] for index in indices[1:3]])
            assert _plain(part) == _plain(expected)
        assert sizes_of(split_microbatches(batch.microbatches, 2)) == [2, 2, 1, 2, 2, 1]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Graphs):
        return _plain(vars(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def test_batch_classes_move_by_their_own_method() -> None:
    cpu = torch.device("cpu")
    sequence, _ = packed([Sequences()[index] for index in range(3)])
    moved = on_device(sequence, cpu, torch.float64)
    assert isinstance(moved, PackedSequence)
    assert moved.data.dtype == torch.float64
    assert moved.batch_sizes.equal(sequence.batch_sizes)
    graphs = on_device({"g": batched_graphs([Sequences()[1]])}, cpu, torch.float64)["g"]
    assert (graphs.nodes.dtype, graphs.y.dtype) == (torch.float64, torch.int64)

    class Moves:
        device = None

        def to(self, device: torch.device) -> Moves:
            self.device = device
            return self

    assert on_device([Moves()], cpu, torch.float64)[0].device == cpu
    pair = namedtuple("pair", "a b")
    assert on_device(pair(torch.ones(1), "text"), cpu, torch.float64).a.dtype == torch.float64


# ---------------------------------------------------------------- the section


def one(samples: list[Any], size: int = 1) -> Any:
    return samples[:size]


def factory(size: int = 1) -> Any:
    return lambda samples: samples[:size]


def test_what_collate_names() -> None:
    here = __name__
    assert build_function(f"{here}.one")([1, 2]) == [1]
    assert build_function({"_target_": f"{here}.one", "size": 2})([1, 2, 3]) == [1, 2]
    assert build_function({"_target_": f"{here}.factory", "size": 2})([1, 2, 3]) == [1, 2]
    assert isinstance(build_function("pad"), Pad)
    padded = build_function({"_target_": "pad", "length": 3})
    assert isinstance(padded, Pad)
    assert padded.length == 3


def source(**keys: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.Sequences", **keys}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"inputs": 1.5}, r"`data\.inputs` must be"),
        ({"collate": "pda"}, r"`data\.collate` must be pad, list or the dotted path"),
        ({"collate": {"_target_": "pad", "lenght": 3}}, r"`data\.collate\.lenght` is not an argument"),
        ({"collate": {"_target_": "pad", "length": 0}}, r"`data\.collate\.length` must be"),
        (
            {"collate": {"_target_": f"{__name__}.one", "sise": 3}},
            r"`data\.collate\.sise` is not",
        ),
        ({"collate": {"length": 3}}, r"`data\.collate\._target_` must be"),
        ({"evaluation": 1.5}, r"`data\.evaluation` must be"),
        (
            {"evaluation": {"_target_": "no.such"}},
            r"`data\.evaluation\._target_` must be an importable",
        ),
    ],
)
def test_wrong_keys_are_one_sentence_each(keys: dict[str, Any], words: str) -> None:
    (problem,) = check_samples(source(**keys))
    assert re.search(words, problem), problem


def test_right_keys_have_no_problem() -> None:
    keys = {"inputs": ["a", "b"], "targets": 1, "collate": {"_target_": f"{__name__}.one", "size": 3}}
    assert check_samples(source(**keys, evaluation=0.1)) == []
    assert check_samples(source(collate=None, inputs=None)) == []


class TakesInputs(TensorDataset):
    def __init__(self, inputs: int = 4) -> None:
        super().__init__(torch.zeros(inputs, 2), torch.zeros(inputs))


def test_a_class_with_an_argument_of_that_name_gets_it() -> None:
    node = {"_target_": f"{__name__}.TakesInputs"}
    assert len(build_data({**node, "inputs": 6}).train) == 6  # type: ignore[arg-type]
    assert len(build_data({**node, "inputs": None, "targets": None}).train) == 4  # type: ignore[arg-type]
    assert build_data({**node, "inputs": 6, "targets": 1}).collate.targets == 1


def splits(*names: str) -> dict[str, Any]:
    return {name: TensorDataset(torch.full((4,), float(n)), torch.zeros(4)) for n, name in enumerate(names)}


def test_named_splits_are_training_and_evaluation_data() -> None:
    def built(*names: str) -> Any:
        return build_data({"_target_": f"{__name__}.splits", "_args_": list(names)})

    assert built("train", "test").evaluation[0][0] == 1
    assert built("train", "test", "validation").evaluation[0][0] == 2
    assert built("train").evaluation is None
    with pytest.raises(ConfigError, match=r"a split `train`, but its splits are test, other\."):
        built("test", "other")


def test_evaluation_data_are_drawn_by_the_seed_or_built() -> None:
    def parts(seed: int) -> tuple[list[int], list[int]]:
        with seeded(seed):
            data = build_data(source(evaluation=0.25))
        train: Any = data.train
        evaluation: Any = data.evaluation
        return [y for _, y in train], [y for _, y in evaluation]

    train, evaluation = parts(0)
    assert (len(train), len(evaluation)) == (15, 5)
    assert sorted(train + evaluation) == list(range(20))
    assert parts(0) == (train, evaluation)
    assert parts(1) != (train, evaluation)
    other = build_data(source(evaluation={"_target_": f"{__name__}.TakesInputs", "inputs": 3}))
    assert len(other.evaluation) == 3  # type: ignore[arg-type]
    for wanted, words in (
        (0.01, "both parts of the 20 samples"),
        ({"_target_": "builtins.int"}, "a data set"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_data(source(evaluation=wanted))


def test_data_sets_of_hugging_face_give_tensors() -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"ids": [[1, 2], [3]], "labels": [0, 1]})
    rows = in_torch(made)
    assert isinstance(rows[0]["ids"], Tensor)
    inputs, targets = Collate(Pad(mask="real"), targets="labels").load(rows, [0, 1])
    assert inputs["ids"].tolist() == [[1, 2], [3, 0]]
    assert targets.tolist() == [0, 1]
    chosen = made.with_format("numpy")
    assert in_torch(chosen) is chosen
