"""Checkpoints of a card: copied beside its work, read by a processor and back, random numbers included."""

from __future__ import annotations

from pathlib import Path

import torch
from resume_matrix import CUDA, LAYOUTS, LIMIT, difference, train
from support import Train

from hetexp.checkpoint.snapshot import HostCopies
from hetexp.core.device import DeviceSpec
from hetexp.hardware.backends.cuda import CudaBackend

STEPS, MORE = 3, 6


def test_between_cuda_and_cpu_in_both_directions(tmp_path: Path) -> None:
    layouts = {"cpu": LAYOUTS["single"], "cpus": LAYOUTS["ddp, 3"], **CUDA}
    for saver in ("cpu", *CUDA):
        saved = train(tmp_path / saver, layouts[saver], STEPS)
        alone = train(tmp_path / f"{saver} alone", layouts["cpu"], MORE, saved.folder)
        for loader in ("cpus", *CUDA):
            found = train(tmp_path / f"{saver} {loader}", layouts[loader], MORE, saved.folder)
            assert difference(found, alone) <= LIMIT, (saver, loader)


def test_dropout_on_a_card_goes_on_to_the_bit(train: Train) -> None:
    """Torch's own generator of the card, in the middle of the run."""
    options = (
        *("hardware.devices=[cuda:0]", "strategy=single", "model=mlp", "model.dropout=0.3", "data=synthetic"),
        *("trainer.global_batch_size=32", "trainer.max_epochs=null", "trainer.log_every=1"),
        "trainer.checkpoint_every=5",
    )
    whole = train(*options, "trainer.max_steps=12")
    rest = train(*options, "trainer.max_steps=12", f"resume={whole.folder / 'checkpoints' / 'step_00000005'}")
    assert rest.losses == whole.losses[5:]
    assert all(torch.equal(rest.parameters()[key], value) for key, value in whole.parameters().items())


def test_a_snapshot_is_of_the_moment_it_was_asked_for() -> None:
    """The card copies into page-locked memory while the host queues changes."""
    backend = CudaBackend(DeviceSpec(id="cuda:0", backend="cuda", index=0, name="card", vendor="nvidia"))
    tensors = {f"{k}": torch.full((2**24,), float(k), device="cuda") for k in range(8)}
    tensors["strided"] = torch.arange(8.0, device="cuda")[::2]
    memory = HostCopies(backend.lock_pages)
    for added in range(3):
        copies, arrived = memory.take(tensors)
        assert memory._unlock is not None, "the memory is not page-locked"
        for tensor in tensors.values():
            tensor.add_(1.0)
        arrived()
        for k in range(8):
            assert float(copies[f"{k}"].min()) == float(copies[f"{k}"].max()) == k + added
        assert copies["strided"].tolist() == [added, 2.0 + added, 4.0 + added, 6.0 + added]
