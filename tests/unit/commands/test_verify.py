"""What a certificate says of two runs' folders, and which commands `hetexp verify` refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hetexp.cli import main
from hetexp.commands.support.certificate import Certificate, Comparison, Tolerance, compare
from hetexp.launch.processes import members

FACTS: dict[str, Any] = {
    "date": "2026-01-31",
    "machine": "a machine",
    "versions": {"hetexp": "1", "python": "3", "torch": "2"},
    "overrides": ["model=mlp"],
    "strategy": "ddp",
    "devices": [{"id": "cpu:0", "name": "CPU", "samples": 3}, {"id": "cpu:1", "name": "CPU", "samples": 1}],
    "emulated": True,
    "precision": "float64",
    "reference": "cpu:0 (CPU)",
    "cut": "accumulate 1",
}


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(members, "start_rank", never)


def run_folder(
    folder: Path, factor: float = 1.0, steps: int = 2, loss: float = 2.0, norm: float = 0.5
) -> Path:
    """Write what two steps of a run leave behind; its second tensor is off by a factor from step 2 on."""
    folder.mkdir()
    lines = []
    for step in range(1, steps + 1):
        inner = folder / "checkpoints" / f"step_{step:08d}"
        inner.mkdir(parents=True)
        off = factor if step > 1 else 1.0
        tensors = {
            "a": torch.full((3,), 2.0, dtype=torch.float64),
            "b": torch.full((2,), 2.0 * off, dtype=torch.float64),
        }
        save_file(tensors, inner / "model.safetensors")
        lines.append({"step": step, "train/loss": loss, "train/grad_norm": norm * off})
        lines.append({"step": step, "eval/loss": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_two_runs_are_compared_step_by_step(tmp_path: Path) -> None:
    reference = run_folder(tmp_path / "alone")
    found = compare(run_folder(tmp_path / "run", factor=1.5, loss=2.5), reference)
    first, second = found.steps
    assert (first.parameter_error, first.grad_norm_error) == (0.0, 0.0)
    assert second.parameter_error == pytest.approx((2 * 1.0 / (5 * 4.0)) ** 0.5)
    assert second.worst_tensor == "b"
    assert (found.loss_error, found.grad_norm_error) == (0.25, 0.5)
    assert compare(reference, reference).parameter_error == 0.0
    with pytest.raises(ValueError, match="same steps"):
        compare(run_folder(tmp_path / "short", steps=1), reference)


def test_numbers_that_are_none_are_as_far_off_as_can_be(tmp_path: Path) -> None:
    reference = run_folder(tmp_path / "alone")
    found = compare(run_folder(tmp_path / "run", factor=float("nan"), loss=float("nan")), reference)
    assert found.loss_error == found.parameter_error == found.grad_norm_error == float("inf")
    assert found.steps[1].worst_tensor == "b"
    assert not found.within(Tolerance(1e9, 1e9, 1e9))


def certificate(run: Comparison, control: Comparison | None, differ: bool = True) -> Certificate:
    return Certificate(FACTS, run, Tolerance(), control, differ)


def test_verdicts(tmp_path: Path) -> None:
    reference = run_folder(tmp_path / "alone")
    same = compare(reference, reference)
    near = compare(run_folder(tmp_path / "near", factor=1 + 1e-13), reference)
    wrong = compare(run_folder(tmp_path / "wrong", factor=1 + 1e-9), reference)
    assert certificate(same, wrong).verdict == "exact"
    assert certificate(wrong, wrong).verdict == "not exact"
    assert certificate(same, same).verdict == "not conclusive"
    assert certificate(same, None).verdict == "not conclusive"
    assert certificate(same, same, differ=False).verdict == "exact"
    assert certificate(same, None, differ=False).verdict == "exact"
    assert 0 < near.parameter_error < 1e-12
    assert certificate(near, wrong).verdict == "exact"
    twice = Tolerance.of_microbatches([near, wrong])
    assert twice.parameters == 2 * wrong.parameter_error
    assert Certificate(FACTS, wrong, twice).verdict == "exact"


def test_a_gradient_that_only_its_norm_shows_to_be_wrong_is_not_exact(tmp_path: Path) -> None:
    reference = run_folder(tmp_path / "alone")
    loud = compare(run_folder(tmp_path / "loud", norm=0.5 * 1.01), reference)
    assert loud.loss_error == loud.parameter_error == 0.0
    assert certificate(loud, None, differ=False).verdict == "not exact"
    cut = compare(run_folder(tmp_path / "cut", norm=0.5 * (1 + 1e-7)), reference)
    allowed = Tolerance.of_microbatches([cut])
    assert allowed.grad_norm == 2 * cut.grad_norm_error
    assert Certificate(FACTS, cut, allowed).verdict == "exact"
    assert Certificate(FACTS, loud, allowed).verdict == "not exact"


def test_what_a_person_reads(tmp_path: Path) -> None:
    reference = run_folder(tmp_path / "alone")
    same = compare(reference, reference)
    wrong = compare(run_folder(tmp_path / "wrong", factor=1.5), reference)
    text = certificate(same, wrong).markdown()
    assert text.startswith("# ddp on 2 device(s): exact\n")
    assert "| cpu:1 | CPU | 1 |" in text and "Emulated" in text and "`model=mlp`" in text
    assert "| 2 | 2 | 0.0e+00 | 0.0e+00 | – | 0.0e+00 |" in text
    assert "wrong as it must be" in text
    assert "proves nothing" in certificate(same, same).markdown()
    assert "unless targets are masked" in certificate(same, same, differ=False).markdown()
    assert "There is no control" in certificate(same, None, differ=False).markdown()
    told = json.loads(json.dumps(certificate(wrong, wrong).to_dict()))
    assert (told["schema"], told["verdict"]) == (1, "not exact")
    assert told["run"]["steps"][1]["worst_tensor"] == "b"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer.max_stps=5"], "Did you mean `max_steps`?"),
        (["resume=outputs"], "`resume` must be null for hetexp verify"),
        (["hardware.devices=[emulated:arc_a770,cpu]"], "--precision float32 asks for less"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny = ["model=mlp", "data=synthetic", "balancing=equal", "hardware.check_memory=false"]
    assert main(["verify", *tiny, "hardware=cpu", *words, "--output", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


def test_a_strategy_that_claims_no_exactness_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hetexp.strategy.ddp.DDP.exact", False)
    tiny = ["model=mlp", "data=synthetic", "hardware=cpu", "balancing=equal"]
    assert main(["verify", *tiny, "--output", str(tmp_path / "out")]) == 2
    assert "there is nothing to certify" in capsys.readouterr().err
