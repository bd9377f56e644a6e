"""What carries the exchange of whole runs: memory, codes, what frozen weights cost, a path that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import Train, worst

from hetexp.comm.compression import BLOCK
from hetexp.core.errors import RunFailedError

STEPS = 4
TRAINED = 512 * 4 + 4
COMMON = (
    "data=synthetic",
    "data.num_samples=120",
    "data.num_test_samples=20",
    "data.input_shape=[16]",
    "data.num_classes=4",
    "model=custom",
    "model._target_=counted.HalfFrozen",
    "trainer.global_batch_size=24",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.log_every=1",
)
SAVED = ("trainer.checkpoint_every=1", "trainer.precision=float64")
THREE = ("hardware.devices=[cpu,cpu,cpu]", "balancing=manual", "balancing.weights=[4,12,8]")


def counted(folder: Path) -> list[list[int]]:
    """Return the bytes that each rank has summed after the self-test."""
    files = sorted(folder.iterdir())
    return [[int(line) for line in file.read_text().split()][3:] for file in files]


@pytest.mark.parametrize(
    ("wire", "num_bytes"),
    [("float32", 4 * TRAINED), ("int8", (-(-TRAINED // BLOCK)) * (BLOCK + 4))],
)
def test_frozen_weights_are_never_sent(train: Train, tmp_path: Path, wire: str, num_bytes: int) -> None:
    """Case 46, by the bytes that really go through the memory; and `comm.env` reaches every rank."""
    folder = tmp_path / "counted"
    folder.mkdir()
    run = train(*COMMON, *THREE, "comm=shm", f"comm.wire={wire}", f"comm.env={{COUNTED: '{folder}'}}")
    each = counted(folder)
    assert len(each) == 3
    assert all(sum(one) == STEPS * num_bytes for one in each)
    comm = run.summary["comm"]
    assert (comm["backend"], comm["wire_dtype"], comm["fallback"]) == ("shm", wire, None)
    assert comm["bytes_per_step"] == num_bytes
    assert comm["exchange_s"] > 0
    assert "The exchange goes by shm, in memory that all ranks share (cpu)." in run.screen


def test_a_path_that_returns_zeros_is_left(train: Train) -> None:
    """Case S7: every rank goes over to gloo, all are told, and the steps are those of one device."""
    one = train(*COMMON, *SAVED, "hardware=cpu", "strategy=single")
    run = train(*COMMON, *SAVED, *THREE, "comm.env={SPOILED: 1}")
    loss, parameters = worst(run, one, STEPS)
    assert loss <= 1e-12
    assert parameters <= 1e-12
    comm = run.summary["comm"]
    assert (comm["backend"], comm["wire_dtype"]) == ("gloo", "float64")
    assert (comm["fallback"]["from"], comm["fallback"]["to"]) == ("shm", "gloo")
    assert "numbers of a sum came back zeros (number 0 is 0 instead of" in comm["fallback"]["reason"]
    assert run.screen.count("The exchange by shm failed its self-test") == 1  # of rank 0 alone
    assert "Exchanged not by shm but by gloo: " in run.screen


def test_several_levels_are_exact(train: Train) -> None:
    """Two machines, emulated: memory in each, gloo between their leaders."""
    one = train(*COMMON, *SAVED, "hardware=cpu", "strategy=single")
    card = "{device: 'emulated:a100', host: %s}"
    run = train(*COMMON, *SAVED, f"hardware.devices=[{card % 'a'},{card % 'b'},{card % 'a'}]")
    assert max(worst(run, one, STEPS)) <= 1e-12
    comm = run.summary["comm"]
    assert (comm["backend"], comm["fallback"]) == ("shm + gloo", None)
    assert "by shm over emulated:0 + emulated:2, then by gloo over emulated:0 + emulated:1." in run.screen


def test_what_was_asked_for_is_not_replaced(train: Train) -> None:
    with pytest.raises(RunFailedError) as failed:
        train(*COMMON, *THREE, "comm=shm", "comm.env={SPOILED: 1}")
    assert "shm failed the self-test: " in str(failed.value)
