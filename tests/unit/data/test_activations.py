"""Vectors in files: read where they are asked for, in order, scaled by one factor; what is wrong is told."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hetexp.core.errors import ConfigError
from hetexp.data.activations import Activations
from hetexp.data.prefetch import is_prefetchable


def rows(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + 3 * count, dtype=torch.float32).view(count, 3)


def test_samples_are_the_rows_of_all_files_in_order(tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", rows(4, 30).numpy())
    np.save(tmp_path / "c.npy", np.asfortranarray(rows(2, 42).numpy()))
    save_file({"activations": rows(10), "tokens": torch.zeros(10)}, tmp_path / "a.safetensors")
    data = Activations(str(tmp_path), test_fraction=0.25, normalise="none")
    assert len(data.train) == 12 and len(data.evaluation) == 4  # type: ignore[arg-type]
    places = [11, 0, 9, 10, 0]
    found = torch.stack([vector for vector, _ in data.train.__getitems__(places)])  # type: ignore[attr-defined]
    assert torch.equal(found, rows(16)[places])
    inputs, targets = data.evaluation[3]  # type: ignore[index]
    assert torch.equal(inputs, rows(16)[15]) and torch.equal(targets, inputs)
    assert is_prefetchable(data.train)
    again = pickle.loads(pickle.dumps(data.train))  # as to a process that loads
    assert torch.equal(again[11][0], rows(16)[11])
    with pytest.raises(IndexError):
        data.train[12]
    assert len(Activations(str(tmp_path), limit=5).train) == 5  # type: ignore[arg-type]


def test_the_mean_length_becomes_the_root_of_the_width(tmp_path: Path) -> None:
    vectors = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)) * 7 + 3
    save_file({"x": vectors[:40].bfloat16()}, tmp_path / "train.safetensors")
    save_file({"x": vectors[40:].bfloat16()}, tmp_path / "evaluation.safetensors")
    data = Activations(str(tmp_path))
    train = torch.stack([data.train[index][0] for index in range(40)])
    assert train.dtype == torch.float32
    assert float(train.norm(dim=1).mean()) == pytest.approx(4.0, rel=1e-6)
    factor = data.facts["scale"]
    judged = torch.stack([data.evaluation[index][0] for index in range(10)])  # type: ignore[index]
    assert torch.allclose(judged, vectors[40:].bfloat16().float() * factor)
    assert data.facts["input_size"] == 16
    assert data.facts["mean"] == pytest.approx(train.mean(dim=0).tolist(), rel=1e-5)


def test_what_is_wrong_is_told_by_file(tmp_path: Path) -> None:
    def told() -> str:
        problems = Activations.check(folder=str(tmp_path))
        assert problems
        with pytest.raises(ConfigError):
            Activations(str(tmp_path))
        return " ".join(problems)

    assert "at least one .npy or .safetensors file" in told()
    assert "an existing folder" in Activations.check(folder=str(tmp_path / "nowhere"))[0]
    np.save(tmp_path / "a.npy", np.ones((4, 3), dtype=np.float32))
    np.save(tmp_path / "b.npy", np.ones((4, 5), dtype=np.float32))
    assert "b.npy holds vectors of 5 <f4, but a.npy of 3 <f4" in told()
    np.save(tmp_path / "b.npy", np.ones((4, 3, 2), dtype=np.float32))
    assert "b.npy holds an array of shape [4, 3, 2]" in told()
    np.save(tmp_path / "b.npy", np.ones((4, 3), dtype=np.int64))
    assert "b.npy holds int64, and not float16" in told()
    (tmp_path / "b.npy").write_bytes(b"no array")
    assert "b.npy is no array of NumPy" in told()
    np.save(tmp_path / "b.npy", np.ones((4, 3), dtype=np.float32))
    content = (tmp_path / "b.npy").read_bytes()
    (tmp_path / "b.npy").write_bytes(content[:-8])
    assert "b.npy is cut off" in told()
    (tmp_path / "b.npy").unlink()
    save_file({"x": torch.ones(2, 3), "y": torch.ones(2, 3)}, tmp_path / "c.safetensors")
    assert "must hold one tensor, or one named activations" in told()
    (tmp_path / "c.safetensors").unlink()
    assert "has no source.json" in Activations.check(folder=str(tmp_path), loss_recovered=5)[0]
    (tmp_path / "c.safetensors").write_bytes(b"0" * 100)
    assert "c.safetensors is no safetensors file" in told()


def test_vectors_without_a_length_have_no_factor(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((4, 3), dtype=np.float32))
    with pytest.raises(ConfigError, match="finite numbers that are not all 0"):
        Activations(str(tmp_path))
