"""A person's own loop on a real card: alone, beside the CPU, and on two cards."""

from __future__ import annotations

from pathlib import Path

import own_loop
import pytest
import torch
from support import difference, start_script

import hetexp

SCRIPT = Path(own_loop.__file__)
BESIDE_CPU = ("hardware.devices=[cuda:0,cpu]", "balancing=manual", "balancing.weights=[28,4]")
CARDS = ("hardware.devices=[cuda:0,cuda:1]", "balancing=manual", "balancing.weights=[3,1]")


def test_alone_in_this_process(tmp_path: Path) -> None:
    """Other cards may be visible: the current one is taken."""
    model, optimizer, data = own_loop.make("tokens")
    run = hetexp.setup(
        model, optimizer, data, global_batch_size=own_loop.BATCH, seed=own_loop.SEED, run_dir=tmp_path
    )
    assert run.device == torch.device("cuda", torch.cuda.current_device())
    for inputs, targets in run.batches():
        assert inputs.device == targets.device == run.device
        run.backward(own_loop.mean_loss(run.model(inputs), targets), count=(targets != -100).sum())
        run.clip_norm(own_loop.CLIP)
        optimizer.step()
        optimizer.zero_grad()
    run.save()
    summary = run.finish()
    assert summary["devices"][0]["backend"] == "cuda"
    assert summary["devices"][0]["peak_memory"] > 0
    *_, (_, expected) = own_loop.plain_loop("tokens", 3)
    assert difference({k: v.cpu() for k, v in own_loop.snapshot(model).items()}, expected) <= 1e-12


@pytest.mark.parametrize("case", ["tokens", "norm"])
def test_on_a_card_and_the_cpu(tmp_path: Path, case: str) -> None:
    launched(tmp_path, BESIDE_CPU, case)


def test_on_two_cards(tmp_path: Path) -> None:
    launched(tmp_path, CARDS, "norm")


def launched(folder: Path, layout: tuple[str, ...], case: str) -> None:
    run = start_script(folder / "run", SCRIPT, layout, case, str(folder), "--steps", "20")
    reference = list(own_loop.plain_loop(case, 20))
    for rank in range(2):
        told = torch.load(folder / f"rank_{rank}.pt", map_location="cpu")
        found = [difference(step["weights"], w) for step, (_, w) in zip(told["steps"], reference)]
        print(f"{case}, rank {rank}, {told['device']}: parameters {max(found):.2e}")
        assert len(found) == 20
        assert max(found) <= 1e-12
    assert run.summary["status"] == "completed"
