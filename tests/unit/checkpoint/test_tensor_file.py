"""Our own writer of safetensors files: the library reads the same back, and the checksum is the file's."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hetexp.checkpoint import tensor_file
from hetexp.checkpoint.snapshot import HostCopies
from hetexp.checkpoint.tensor_file import check_storable, write_tensors
from hetexp.core.errors import CheckpointError

TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.uint8, torch.bool, torch.complex64),
]


def test_every_type_and_shape_is_read_back_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 7)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"ä.{dtype}".replace("torch.", ""): torch.randint(2, (3, 5), generator=generator).to(dtype)
        for dtype in TYPES
    }
    tensors |= {
        "nothing": torch.empty(0, 3),
        "one": torch.tensor(1 / 3),
        "transposed": torch.randn(4, 3, generator=generator).t(),
        "strided": torch.randn(9, generator=generator)[::2],
        "expanded": torch.randn(1, 2, generator=generator).expand(3, 2),
    }
    copies, arrived = HostCopies().take(tensors)
    arrived()
    path = tmp_path / "model.safetensors"
    written = write_tensors(path, copies, {"tied": "one"})
    content = path.read_bytes()
    assert (written.num_bytes, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape, name
        assert bytes(read[name].contiguous().reshape(-1).view(torch.uint8).tolist()) == bytes(
            tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
        ), name
    with safe_open(path, "pt", "cpu") as file:
        assert file.metadata() == {"tied": "one"}


def test_a_file_without_tensors(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", {}, {})
    assert load_file(tmp_path / "x.safetensors") == {}


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.empty(2, device="meta"), "dense tensor to be saved, but is a meta one"),
        (torch.eye(2).to_sparse(), "is a sparse_coo one"),
        (torch.zeros(1, dtype=torch.complex128), "a type that safetensors has, but is complex128"),
    ],
)
def test_what_cannot_be_stored_is_named(tensor: torch.Tensor, told: str) -> None:
    with pytest.raises(CheckpointError, match=f"'layer.weight' must be .*{told}"):
        check_storable({"layer.weight": tensor})


def test_copies_keep_their_memory_and_are_of_one_moment() -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16), "c": torch.tensor(7)}
    memory = HostCopies()
    first, _ = memory.take(tensors)
    places = {name: copy.data_ptr() for name, copy in first.items()}
    tensors["a"].fill_(5.0)
    assert first["a"].tolist() == [1.0, 1.0, 1.0]
    second, _ = memory.take(tensors)
    assert {name: copy.data_ptr() for name, copy in second.items()} == places
    assert second["a"].tolist() == [5.0, 5.0, 5.0]
    tensors["c"] = torch.tensor([7, 8])
    assert memory.take(tensors)[0]["c"].tolist() == [7, 8]


def test_a_file_that_takes_a_few_bytes_at_a_time_gets_all_of_them(tmp_path: Path) -> None:
    """A call of the system may write less than it is given: more than 2 GiB, or on a full disk."""

    class Short(io.FileIO):
        def write(self, content: Any) -> int:
            return super().write(memoryview(content)[:5])

    class File(type(tmp_path)):  # type: ignore[misc]
        def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
            return Short(self, mode.replace("b", ""))

    tensors = {"a": torch.arange(20.0)}
    written = write_tensors(File(tmp_path / "short"), tensors, {})
    assert torch.equal(load_file(tmp_path / "short")["a"], tensors["a"])
    assert written.sha256 == hashlib.sha256((tmp_path / "short").read_bytes()).hexdigest()
