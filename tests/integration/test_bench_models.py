"""The benchmark of other people's models on CPU ranks: all ways train, and one table has them."""

from __future__ import annotations

import json
from pathlib import Path

import bench_models
import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TINY = ["--device", "cpu", "--tiny", "--rounds", "1", "--steps", "4", "--threads", "1", "--compile", "no"]


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_all_ways_train_the_same_model(
    tmp_path: Path, ranks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PYTHONPATH", "HETEXP_HOME"):
        monkeypatch.setenv(name, "")  # the script sets both
    out = tmp_path / "models.json"
    chosen = ["--only", "bert", "--workers", "0", "--ranks", ranks]
    bench_models.main([*TINY, *chosen, "--json", str(out)])
    rows = json.loads(out.read_text())
    assert [row["way"] for row in rows] == ["plain", "accelerate", "launch", "train"]
    assert [row.get("error") for row in rows] == [None] * 4
    assert all(row["samples_per_s"] > 0 and row["batch"] == 4 * int(ranks) for row in rows)
    capsys.readouterr()
    bench_models.main(["--show", str(out)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "BERT" in line]
    assert "fails" not in line
