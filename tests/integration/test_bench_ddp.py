"""The benchmarks of `ddp` on two CPU ranks: hetexp and the plain script train the same."""

from __future__ import annotations

import json
from pathlib import Path

import bench_ddp
import bench_exposed
import bench_scaling
import pytest

TINY = ["--device", "cpu", "--ranks", "2", "--tiny", "--rounds", "1"]


def test_hetexp_and_the_plain_script_train_the_same_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "ddp.json"
    steps = ["--steps", "12", "--warm-steps", "6", "--log-every", "6"]
    bench_ddp.main([*TINY, "--precision", "float32", *steps, "--out", str(out)])
    results = json.loads(out.read_text())
    (ours,), (plain,) = results["runs"]["ours"], results["runs"]["plain"]
    assert ours["global_batch"] == plain["global_batch"] == 8
    assert len(ours["losses"]) == len(plain["losses"]) == 3
    assert len(ours["peak_memory_bytes"]) == len(plain["peak_memory_bytes"]) == 2
    assert ours["comm"]["bytes_per_step"] == 4 * results["facts"]["parameters"]
    # Other samples in each step, but the same task from the same weights.
    assert ours["losses"][-1] == pytest.approx(plain["losses"][-1], abs=0.1)


def test_scaling_compares_one_device_with_several(tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    bench_scaling.main([*TINY, "--steps", "2", "--models", "gpt,convnet", "--plain", "--out", str(out)])
    for results in json.loads(out.read_text()).values():
        for runs in results["runs"].values():
            assert {name: (run["global_batch"], len(run["devices"])) for name, (run,) in runs.items()} == {
                "1": (4, 1),
                "2, weak": (8, 2),
                "2, strong": (4, 2),
            }
    assert results["facts"]["sample"] == "images of 3 × 8 × 8"


def test_an_exchange_is_timed_beside_none_and_changes_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the script sets it
    out = tmp_path / "exposed.json"
    given = ["--part", "pair,wires", "--device", "cpu", "--tiny", "--backends", "gloo", "--wires", "float32"]
    bench_exposed.main([*given, "--out", str(out)])
    results = json.loads(out.read_text())
    without, gloo = results["pair"]["runs"]["none"], results["pair"]["runs"]["gloo"]
    assert gloo[0]["losses"] == gloo[1]["losses"] and len(gloo[0]["losses"]) == 4
    assert without[0]["losses"][0] == gloo[0]["losses"][0]  # of the same weights and samples
    assert without[0]["losses"] != gloo[0]["losses"]  # which then grow apart
    assert without[0]["comm"]["bytes_per_step"] == 0
    assert gloo[0]["comm"]["bytes_per_step"] == 4 * results["pair"]["facts"]["parameters"]
    wire = results["wires"]["runs"]["float32"]
    assert wire["eval_loss"] < 4.6 and wire["comm"]["wire_dtype"] == "float32"
    assert wire["comm"]["bytes_per_step"] == 4 * results["wires"]["facts"]["parameters"]
