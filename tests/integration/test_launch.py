"""`hetexp launch`: a person's own loop on several ranks does what it does on one device."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import contrastive
import own_loop
import pytest
import torch
from support import Run, difference, start_script

from hetexp.core.errors import RunFailedError
from hetexp.core.split import apportion, normalise
from hetexp.training.saving.data_facts import PLACES

SCRIPT = Path(own_loop.__file__)
SHARES = ("hardware.devices=[cpu,cpu,cpu]", "balancing=manual", "balancing.weights=[24,6,2]")


def launched(folder: Path, overrides: tuple[str, ...], *arguments: str) -> tuple[Run, list[dict[str, Any]]]:
    """Return the run, and what each rank told."""
    case, *rest = arguments
    run = start_script(folder / "run", SCRIPT, overrides, case, str(folder), *rest)
    ranks = range(run.summary["world_size"])
    return run, [torch.load(folder / f"rank_{rank}.pt") for rank in ranks]


def test_a_loop_with_tokens_equals_one_device(tmp_path: Path) -> None:
    """Unequal shares, tail batches, masked labels, accumulation and clipping, in float64."""
    run, ranks = launched(tmp_path, SHARES, "tokens", "--accumulate", "2")
    reference = list(own_loop.plain_loop("tokens", 20))
    assert len(run.losses) == len(reference) == 20
    for rank in ranks:
        assert len(rank["steps"]) == 20
        for told, (_, weights) in zip(rank["steps"], reference, strict=True):
            assert difference(told["weights"], weights) <= 1e-12
    for loss, (expected, _) in zip(run.losses, reference, strict=True):
        if math.isnan(expected):  # a tail batch in which nothing counts
            assert loss is None
        else:
            assert abs(loss - expected) <= 1e-12 * abs(expected)
    assert run.losses.count(None) == 1  # type: ignore[arg-type]
    norms = [told["norm"] for told in ranks[0]["steps"]]
    assert max(norms) > own_loop.CLIP > min(norms)
    assert norms == pytest.approx([told["norm"] for told in ranks[2]["steps"]], rel=1e-12)
    # What this is about did happen: means over nothing, and ranks without samples.
    assert any(count == 0 for count in ranks[2]["counts"])
    assert any(math.isnan(loss) for loss in ranks[2]["losses"])
    assert sum(ranks[0]["counts"]) > 5 * sum(ranks[2]["counts"])


def test_a_loop_with_weighted_classes_equals_one_device(tmp_path: Path) -> None:
    """torch's mean over the sum of the classes' weights, of which no rank's is whole."""
    shares = ("hardware.devices=[cpu,cpu,cpu]", "balancing=manual", "balancing.weights=[5,2,1]")
    run, ranks = launched(tmp_path, shares, "weighted", "--steps", "8", "--accumulate", "2")
    reference = list(own_loop.plain_loop("weighted", 8))
    assert run.losses == pytest.approx([loss for loss, _ in reference], rel=1e-12)
    for rank in ranks:
        for told, (_, weights) in zip(rank["steps"], reference, strict=True):
            assert difference(told["weights"], weights) <= 1e-12


@pytest.mark.parametrize("shares", [(24, 6, 2), (3, 1), (1,)])
def test_a_loop_with_several_losses_equals_one_device(tmp_path: Path, shares: tuple[int, ...]) -> None:
    """Two means of different counts, of which a rank has none of one, or no samples at all."""
    options: tuple[str, ...] = (
        f"hardware.devices=[{','.join(['cpu'] * len(shares))}]",
        *("balancing=manual", f"balancing.weights={list(shares)}".replace(" ", "")),
    )
    if len(shares) == 1:
        options = ("hardware.devices=[cpu]", "strategy=single")
    run, ranks = launched(tmp_path, options, "several", "--steps", "9")
    reference = list(own_loop.plain_loop("several", 9))
    for rank in ranks:
        for seen, (_, weights) in zip(rank["steps"], reference, strict=True):
            assert difference(seen["weights"], weights) <= 1e-12
    for loss, (expected, _) in zip(run.losses, reference, strict=True):
        assert math.isnan(expected) or loss == pytest.approx(expected, rel=1e-12)
    if len(shares) == 3:
        assert any(math.isnan(loss) for loss in ranks[2]["losses"])
        assert 0 in [count for count, loss in zip(ranks[2]["counts"], ranks[2]["losses"]) if math.isnan(loss)]


def test_several_losses_in_several_microbatches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"must see the whole batch at once if it gets several losses"):
        launched(tmp_path, SHARES, "several", "--accumulate", "2")


UNEQUAL = """
import torch
from torch import nn
import hetexp

sequences = [(torch.ones(3 + n % 2), torch.tensor(0)) for n in range(8)]
model = nn.Linear(3, 2)
run = hetexp.setup(model, torch.optim.SGD(model.parameters()), sequences, global_batch_size=4)
for inputs, targets in run.batches():
    run.backward(nn.functional.cross_entropy(run.model(inputs), targets))
"""


def test_samples_of_different_length_are_one_sentence(tmp_path: Path) -> None:
    (script := tmp_path / "unequal.py").write_text(UNEQUAL)
    with pytest.raises(
        RunFailedError, match=r"`collate` must be pad, list or .*inputs are \[[34]\] .* \[[34]\]"
    ) as caught:
        start_script(tmp_path / "run", script, ("hardware.devices=[cpu,cpu]",))
    assert "Traceback" not in str(caught.value)


def test_a_loop_with_rows_whatever_the_shares(tmp_path: Path) -> None:
    """BatchNorm over unequal parts, empty ones and such in which nothing counts, in float64."""
    run, ranks = launched(tmp_path, SHARES, "norm", "--steps", "7")
    assert [len(rank["steps"]) for rank in ranks] == [7, 7, 7]
    reference = list(own_loop.plain_loop("norm", 7))
    for rank in ranks:
        for told, (_, weights) in zip(rank["steps"], reference, strict=True):
            assert difference(told["weights"], weights) <= 1e-12  # running statistics, too
    assert ranks[0]["evaluation"] == ranks[1]["evaluation"] == ranks[2]["evaluation"]
    assert ranks[0]["evaluation"]["samples"] == own_loop.SAMPLES
    last = [rank["counts"][-1] for rank in ranks]
    assert ranks[0]["logged"] == {"mine": pytest.approx((last[1] + 2 * last[2]) / sum(last))}
    # With samples and without a class, a rank still takes part in the others' statistics and gradients.
    assert 0 in [count for count, loss in zip(ranks[2]["counts"], ranks[2]["losses"]) if math.isnan(loss)]
    assert run.summary["status"] == "completed"
    assert (run.summary["steps"], run.summary["samples"]) == (7, 32 * 5 + 2 * 2)
    assert run.summary["final"]["eval"] == ranks[0]["evaluation"]
    assert (run.summary["global_batch"], run.summary["seed"]) == (32, own_loop.SEED)
    assert [device["local_batch"] for device in run.summary["devices"]] == [24, 6, 2]
    assert Path(run.summary["checkpoint"]).name == "step_00000007"
    # Another mix goes on from there.
    pair = ("hardware.devices=[cpu,cpu]", "balancing=manual", "balancing.weights=[3,1]")
    (tmp_path / "more").mkdir()
    more, ranks = launched(tmp_path / "more", (*pair, f"resume={tmp_path}/run"), "norm", "--steps", "9")
    assert [len(rank["steps"]) for rank in ranks] == [2, 2]
    assert more.summary["steps"] == 9


RANDOM = """
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, get_worker_info

import hetexp

order = np.random.permutation(32).tolist()
print("split", order, random.random(), flush=True)


class Noisy(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        noise = np.random.randn(4) + random.gauss(0.0, 1.0) + torch.randn(4).numpy()
        if get_worker_info() is None:
            print("drawn", noise.tolist(), flush=True)
        return torch.tensor(index + noise, dtype=torch.float32)


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
workers = len(__import__("sys").argv) - 1
data = Subset(Noisy(), order[:24])
run = hetexp.setup(model, optimizer, data, global_batch_size=8, log_every=1, num_workers=workers)
for batch in run.batches():
    run.backward(run.model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_draws_repeats(tmp_path: Path, ranks: int, workers: int) -> None:
    """What it draws before `setup` is the same on all ranks: its weights, a split. Its samples differ."""
    script = tmp_path / "draws.py"
    script.write_text(RANDOM)
    options = (f"hardware.devices=[{','.join(['cpu'] * ranks)}]",)
    runs = [start_script(tmp_path / name, script, options, *["w"] * workers) for name in ("one", "again")]
    assert runs[0].losses == runs[1].losses
    logs = [
        (run.folder / "logs" / f"rank_{rank}.log").read_text().splitlines()
        for run in runs
        for rank in range(ranks)
    ]
    splits = [[line for line in log if line.startswith("split")] for log in logs]
    assert splits == [splits[0]] * len(logs)
    drawn = [{line for line in log if line.startswith("drawn")} for log in logs]
    if ranks > 1 and not workers:
        assert len(drawn[0] & drawn[1]) <= 2 * PLACES < len(drawn[0])  # but for those that ranks compare


def test_emulated_cards_are_paced_and_followed(tmp_path: Path) -> None:
    slow = "{device: 'emulated:t4', slow: 3}"
    mix = (f"hardware.devices=['emulated:t4',{slow}]", "balancing=auto")
    run, ranks = launched(tmp_path, mix, "rows", "--steps", "18")
    assert run.summary["emulated"] is True
    assert run.summary["time_scale"] > 1
    assert "EMULATED DEVICES" in run.screen
    assert run.summary["splits"] >= 1
    assert ranks[0]["counts"][0] == 16
    assert [device["local_batch"] for device in run.summary["devices"]][0] >= 20
    # What was rehearsed left no trace, and no split changes what is learned.
    *_, (_, weights) = own_loop.plain_loop("rows", 18)
    assert difference(ranks[0]["steps"][-1]["weights"], weights) < 1e-5
    emulation = json.loads((run.folder / "emulation.json").read_text())
    assert emulation["predicted_step_s"] > 0
    assert all(device["energy_j"] > 0 for device in run.summary["devices"])
    assert {device["energy_source"] for device in run.summary["devices"]} == {"modelled"}


def test_a_script_that_fails(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError) as caught:
        launched(tmp_path, ("hardware.devices=[cpu,cpu]",), "rows", "--fail-at", "3")
    screen: str = caught.value.screen  # type: ignore[attr-defined]
    assert "rank 1, cpu:1 (" in str(caught.value)
    assert "failed at step 3: ArithmeticError: this script does not like its data" in str(caught.value)
    assert "Followed by: rank 0 (lost a peer)." in screen
    assert 'own_loop.py", line' in screen
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert {failure["device"] for failure in summary["failures"]} == {"cpu:0", "cpu:1"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import sys\nsys.exit(0)\n", "ended without calling hetexp.setup"),
        ("import sys\nsys.exit('no data')\n", "ended itself: sys.exit('no data')."),
    ],
    ids=["no-setup", "exit"],
)
def test_a_script_that_ends(tmp_path: Path, text: str, told: str) -> None:
    script = tmp_path / "ends.py"
    script.write_text(text)
    with pytest.raises(RunFailedError, match="rank [01], cpu:[01] .* failed: .*") as caught:
        start_script(tmp_path / "run", script, ("hardware.devices=[cpu,cpu]",))
    assert told in str(caught.value)


@pytest.mark.parametrize("shares", [(3, 1), (5, 2, 1), (1,)])
@pytest.mark.parametrize("case", ["rows", "whole"])
def test_a_loss_that_couples_samples_equals_one_device(
    tmp_path: Path, case: str, shares: tuple[int, ...]
) -> None:
    """CLIP's loss of gathered features, over a rank's rows or on all of them, with tails of 3 samples."""
    options: tuple[str, ...] = (
        f"hardware.devices=[{','.join(['cpu'] * len(shares))}]",
        *("balancing=manual", f"balancing.weights={list(shares)}".replace(" ", "")),
    )
    if len(shares) == 1:
        options = ("hardware.devices=[cpu]", "strategy=single")
    run = start_script(tmp_path / "run", Path(contrastive.__file__), options, case, str(tmp_path))
    reference = list(contrastive.plain_loop())
    assert run.losses == pytest.approx([loss for loss, _ in reference], rel=1e-12)
    for rank in range(len(shares)):
        steps = torch.load(tmp_path / f"rank_{rank}.pt")
        assert len(steps) == len(reference)
        for weights, (_, expected) in zip(steps, reference, strict=True):
            assert difference(weights, expected) <= 1e-12
    if len(shares) == 3:  # of a tail of 3 the smallest share is empty
        assert apportion(3, normalise(shares)).counts[2] == 0


def test_without_gathered_features_it_is_not_the_loss_of_one_device(tmp_path: Path) -> None:
    options = ("hardware.devices=[cpu,cpu]", "balancing=manual", "balancing.weights=[3,1]")
    run = start_script(tmp_path / "run", Path(contrastive.__file__), options, "alone", str(tmp_path))
    assert run.losses[0] != pytest.approx(next(contrastive.plain_loop())[0], rel=0.05)


def test_gathered_features_of_several_microbatches_are_refused(tmp_path: Path) -> None:
    options = ("hardware.devices=[cpu,cpu]", "balancing=manual", "balancing.weights=[3,1]")
    with pytest.raises(RunFailedError, match=r"run\.gather must see the whole batch at once"):
        start_script(tmp_path / "run", Path(contrastive.__file__), options, "accumulated", str(tmp_path))
