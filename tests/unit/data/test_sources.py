"""The data sources that ship with hetexp, and how the `data` section becomes one."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from sklearn.datasets import load_digits
from torch.utils.data import IterableDataset, TensorDataset

from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import check_component, instantiate, locate
from hetexp.data.base import build_data
from hetexp.data.digits import Digits
from hetexp.data.streams.stream import Stream
from hetexp.data.synthetic import IGNORED, Synthetic
from hetexp.data.text import SHIPPED, Text

CONF = Path(__file__).parents[3] / "conf" / "data"
HERE = "test_sources_targets"

# Three samples of seed 0.
CLASSES = [1, 2, 1]
VALUES = [[1.9444, 1.052], [-1.2394, -0.9038], [0.0171, 0.1462]]


def section(name: str) -> dict[str, Any]:
    node = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"), resolve=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def tensors(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(dataset, TensorDataset)
    inputs, targets = dataset.tensors
    return inputs, targets


# The YAML files


@pytest.mark.parametrize("name", ["digits", "text", "synthetic"])
def test_yaml_lists_every_argument_with_its_default(name: str) -> None:
    node = section(name)
    assert check_component("data", node) == []
    target = node.pop("_target_")
    signature = inspect.signature(locate(target)).parameters
    defaults = {key: p.default for key, p in signature.items()}
    assert node == {key: list(d) if isinstance(d, tuple) else d for key, d in defaults.items()}


@pytest.mark.parametrize("name", ["digits", "text", "synthetic"])
def test_yaml_builds_tensors_of_one_sample(name: str) -> None:
    source = build_data(section(name))
    assert source.evaluation is not None
    for dataset in (source.train, source.evaluation):
        inputs, target = dataset[0]
        assert isinstance(inputs, torch.Tensor)
        assert isinstance(target, torch.Tensor)


@pytest.mark.parametrize("kind", [Digits, Text])
def test_check_and_constructor_have_the_same_defaults(kind: Any) -> None:
    constructor = inspect.signature(kind).parameters
    for name, parameter in inspect.signature(kind.check).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert parameter.default == constructor[name].default


def test_importing_and_checking_data_imports_no_torch() -> None:
    code = (
        "import sys, hetexp.data.base, hetexp.data.sampler, hetexp.data.digits, hetexp.data.synthetic\n"
        "from hetexp.data.text import Text\n"
        "assert Text.check() == []\n"
        "assert not {'torch', 'sklearn'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# build_data


class Squares:
    """A plain map-style dataset with a flag named `train`, as torchvision's have."""

    train = True
    facts = {"num_classes": 3}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index)]), torch.tensor(index**2)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Plain:
    """A stream that knows nothing of torch, and how many samples it has."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class Once:
    """Like a generator: what was taken does not come again."""

    def __init__(self) -> None:
        self._numbers = iter(range(3))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self._numbers)


class HalfSource:
    def __init__(self, evaluation: Any = None) -> None:
        self.train = Squares()
        self.evaluation = evaluation


class Anything:
    pass


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    """Importable name of this file, whatever pytest's import mode."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    return HERE


def test_a_plain_dataset_is_training_data(here: str) -> None:
    source = build_data({"_target_": f"{here}.Squares"})
    assert isinstance(source.train, Squares)
    assert source.evaluation is None
    assert source.facts == {"num_classes": 3}


def test_a_source_without_evaluation_and_facts_is_enough(here: str) -> None:
    source = build_data({"_target_": f"{here}.HalfSource"})
    assert isinstance(source.train, Squares)
    assert source.evaluation is None
    assert source.facts == {}


@pytest.mark.parametrize("name", ["Once", "Anything"])
def test_anything_else_is_refused(here: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_data({"_target_": f"{here}.{name}"})
    assert caught.value.problems[0].startswith(
        "`data._target_` must build a data source, a data set (`__len__` and `__getitem__`) or a stream"
    )
    assert caught.value.problems[0].endswith(f".{name} instead.")


def test_evaluation_data_are_data(here: str) -> None:
    node = {"_target_": f"{here}.HalfSource", "evaluation": {"_target_": f"{here}.Once"}}
    with pytest.raises(
        ConfigError, match="must build evaluation data that is a data set or a stream, or none"
    ):
        build_data(node)


@pytest.mark.parametrize("name", ["Endless", "Plain"])
def test_data_without_indices_are_a_stream(here: str, name: str) -> None:
    source = build_data({"_target_": f"{here}.{name}"})
    assert isinstance(source.train, Stream)
    assert source.train.first(5) == [0, 1, 2]
    assert source.evaluation is None


def test_evaluation_data_may_be_a_stream(here: str) -> None:
    node = {"_target_": f"{here}.HalfSource", "evaluation": {"_target_": f"{here}.Endless"}}
    assert isinstance(build_data(node).evaluation, Stream)


def test_no_part_of_a_stream_is_taken_for_evaluation(here: str) -> None:
    with pytest.raises(ConfigError, match=r"`data.evaluation` must be null or evaluation data of its own"):
        build_data({"_target_": f"{here}.Endless", "evaluation": 0.1})


# Digits


def test_digits_are_images_between_0_and_1_with_every_class_in_both_parts() -> None:
    digits = Digits(size=8)
    (train_x, train_y), (test_x, test_y) = tensors(digits.train), tensors(digits.evaluation)
    assert (train_x.shape, test_x.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert train_x.dtype == torch.float32
    assert train_y.dtype == torch.int64
    assert (float(train_x.min()), float(train_x.max())) == (0.0, 1.0)
    assert digits.facts == {"input_shape": [1, 8, 8], "num_classes": 10}
    # Stratified: each class has about a tenth of the test images.
    assert set(test_y.bincount(minlength=10).tolist()) <= set(range(34, 39))


def test_digits_are_scikit_learns_each_used_once() -> None:
    original, classes = load_digits(return_X_y=True)
    digits = Digits(size=8)
    parts = [tensors(digits.train), tensors(digits.evaluation)]
    rows = [
        (*(16 * image).flatten().tolist(), label)
        for images, labels in parts
        for image, label in zip(images, labels.tolist(), strict=True)
    ]
    assert sorted(rows) == sorted(
        (*row, label) for row, label in zip(original.tolist(), classes, strict=True)
    )


def test_larger_digits_are_the_same_images_enlarged() -> None:
    small, large = (tensors(Digits(**size).train) for size in ({"size": 8}, {}))
    assert large[0].shape == (1437, 1, 32, 32)
    assert Digits().facts["input_shape"] == [1, 32, 32]
    assert torch.equal(small[1], large[1])
    means = torch.nn.functional.avg_pool2d(large[0], 4)
    alike = torch.corrcoef(torch.stack([means.flatten(), small[0].flatten()]))[0, 1]
    assert float(alike) > 0.95
    assert float(large[0].min()) >= 0.0 and float(large[0].max()) <= 1.0


def test_digits_seed_decides_the_split() -> None:
    first, again, other = (tensors(Digits(seed=seed).train)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("fraction", [0.005, 0.996])
def test_digits_need_every_class_in_both_parts(fraction: float) -> None:
    problems = check_component("data", {"_target_": "hetexp.data.digits.Digits", "test_fraction": fraction})
    assert "`data.test_fraction` must be such that both parts" in problems[0]
    with pytest.raises(ConfigError):
        Digits(test_fraction=fraction)


@pytest.mark.parametrize("fraction", [0.0056, 0.994])
def test_digits_smallest_parts_that_pass_the_check_can_be_built(fraction: float) -> None:
    digits = Digits(test_fraction=fraction)
    assert min(len(tensors(part)[0]) for part in (digits.train, digits.evaluation)) >= 10


# Text


def test_shipped_text_is_plain_and_tells_its_source() -> None:
    files = list(SHIPPED.glob("*.txt"))
    assert 100_000 < sum(file.stat().st_size for file in files) < 400_000
    for file in files:
        raw = file.read_bytes()
        assert b"\r" not in raw
        assert raw.decode("utf-8").isascii()
        assert file.name in (SHIPPED / "SOURCE.md").read_text(encoding="utf-8")


def test_text_windows_cover_each_part_in_order_and_do_not_overlap(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("klmnopqrstuvwxyzé", encoding="utf-8")
    (tmp_path / "a.txt").write_text("abcdefghij", encoding="utf-8")
    (tmp_path / "c.md").write_text("not a text", encoding="utf-8")
    text = Text(str(tmp_path), sequence_length=4, test_fraction=0.3)
    assert text.characters == "abcdefghijklmnopqrstuvwxyzé"
    assert text.facts == {"vocab_size": 27, "sequence_length": 4}

    def read(rows: torch.Tensor) -> list[str]:
        return ["".join(text.characters[i] for i in row) for row in rows.tolist()]

    inputs, targets = tensors(text.train)  # 19 of 27 characters
    assert inputs.dtype == targets.dtype == torch.int64
    assert read(inputs) == ["abcd", "efgh", "ijkl", "mnop"]
    assert read(targets) == ["bcde", "fghi", "jklm", "nopq"]
    assert read(tensors(text.evaluation)[0]) == ["tuvw"]


def test_text_line_ends_of_any_system_are_the_same(tmp_path: Path) -> None:
    for name, end in (("unix", b"\n"), ("windows", b"\r\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_bytes(end.join([b"some line"] * 40))
    unix, windows = (Text(str(tmp_path / name), sequence_length=8) for name in ("unix", "windows"))
    assert unix.characters == windows.characters
    assert torch.equal(tensors(unix.train)[0], tensors(windows.train)[0])


@pytest.mark.parametrize(("length", "enough"), [(19, False), (20, True)])
def test_text_must_fill_a_window_in_both_parts(tmp_path: Path, length: int, enough: bool) -> None:
    (tmp_path / "a.txt").write_text("x" * length, encoding="utf-8")
    arguments: dict[str, Any] = {"folder": str(tmp_path), "sequence_length": 9, "test_fraction": 0.5}
    problems = Text.check(**arguments)
    if enough:
        assert problems == []
        assert len(tensors(Text(**arguments).evaluation)[0]) == 1
    else:
        assert "fills one window of 9 characters in both parts" in problems[0]
        assert "Training has 9 characters and evaluation 10, each needs 10:" in problems[0]
        with pytest.raises(ConfigError):
            Text(**arguments)


def test_text_folder_problems_are_told_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "bad.txt").write_bytes(b"caf\xe9 " * 1000)
    expected = {
        "nowhere": "`data.folder` must be an existing folder, but is '{}' instead.",
        "empty": "`data.folder` must be a folder with at least one .txt file, but is '{}' instead.",
        "latin": "`data.folder` must be a folder of readable UTF-8 text, but is '{}' instead. bad.txt cannot",
    }
    for name, sentence in expected.items():
        folder = str(tmp_path / name)
        problems = check_component("data", {"_target_": "hetexp.data.text.Text", "folder": folder})
        assert len(problems) == 1
        assert problems[0].startswith(sentence.format(folder))
        with pytest.raises(ConfigError) as caught:
            instantiate({"_target_": "hetexp.data.text.Text", "folder": folder})
        assert caught.value.problems == problems


# Synthetic


@pytest.mark.parametrize("kind", ["classification", "regression", "tokens"])
def test_synthetic_is_decided_by_its_seed(kind: Any) -> None:
    first, again, other = (tensors(Synthetic(kind=kind, seed=seed).train) for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("kind", ["classification", "regression", "tokens"])
def test_synthetic_evaluation_does_not_change_training(kind: Any) -> None:
    without, source = Synthetic(kind=kind, num_test_samples=0), Synthetic(kind=kind, num_test_samples=9)
    assert without.evaluation is None
    assert torch.equal(tensors(without.train)[1], tensors(source.train)[1])
    assert len(tensors(source.evaluation)[0]) == 9


def test_synthetic_values_are_kept() -> None:
    inputs, targets = tensors(Synthetic(num_samples=3, input_shape=[2], num_classes=3).train)
    assert targets.tolist() == CLASSES
    torch.testing.assert_close(inputs, torch.tensor(VALUES), rtol=0, atol=1e-4)


def test_synthetic_classes_are_near_their_means() -> None:
    source = Synthetic(num_samples=4000, input_shape=[2, 3], num_classes=5)
    inputs, targets = tensors(source.train)
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((4000, 2, 3), torch.float32, torch.int64)
    assert source.facts == {"input_shape": [2, 3], "num_classes": 5}
    means = torch.stack([inputs[targets == c].mean(0) for c in range(5)]).flatten(1)
    test_x, test_y = tensors(source.evaluation)
    nearest = torch.cdist(test_x.flatten(1), means).argmin(1)
    assert float((nearest == test_y).float().mean()) > 0.7  # a fifth by chance


def test_synthetic_regression_is_linear() -> None:
    source = Synthetic(kind="regression", num_samples=2000, input_shape=[6], num_classes=2)
    inputs, targets = tensors(source.train)
    assert (targets.shape, targets.dtype) == ((2000, 2), torch.float32)
    weights = torch.linalg.lstsq(inputs, targets).solution
    test_x, test_y = tensors(source.evaluation)
    assert float((test_x @ weights - test_y).std()) < 0.15
    assert float(test_y.std()) > 0.5


def test_synthetic_tokens_mostly_follow_from_the_one_before() -> None:
    source = Synthetic(kind="tokens", num_samples=500, vocab_size=11, sequence_length=20)
    inputs, targets = tensors(source.train)
    assert inputs.shape == targets.shape == (500, 20)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert source.facts == {"vocab_size": 11, "sequence_length": 20}
    pairs = torch.zeros(11, 11).index_put_(
        (inputs.flatten(), targets.flatten()), torch.tensor(1.0), accumulate=True
    )
    test_x, test_y = tensors(source.evaluation)
    assert 0.85 < float((pairs.argmax(1)[test_x] == test_y).float().mean()) < 0.97


def test_synthetic_masks_targets_unevenly() -> None:
    plain = Synthetic(kind="tokens", num_samples=1000, sequence_length=20)
    masked = Synthetic(kind="tokens", num_samples=1000, sequence_length=20, mask_fraction=0.5)
    inputs, targets = tensors(masked.train)
    kept = (targets != IGNORED).sum(1)
    assert torch.equal(inputs, tensors(plain.train)[0])
    assert 0.45 < 1 - float(kept.float().mean()) / 20 < 0.55
    assert int(kept.min()) == 1  # nearly all masked, but never all
    assert int((kept <= 2).sum()) > 100
    assert int((kept >= 18).sum()) > 100
    visible = targets != IGNORED
    assert torch.equal(targets[visible], tensors(plain.train)[1][visible])


def test_synthetic_limits_are_told_by_key() -> None:
    node = section("synthetic") | {
        "num_samples": 0,
        "mask_fraction": 1.0,
        "kind": "images",
        "input_shape": [],
    }
    keys = [problem.split("`")[1] for problem in check_component("data", node)]
    assert sorted(keys) == ["data.input_shape", "data.kind", "data.mask_fraction", "data.num_samples"]
