"""A net with BatchNorm trains on unequal shares as on one device, running statistics included."""

from __future__ import annotations

import pytest
from support import Train, worst

STEPS = 20
NET = (
    "data=synthetic",
    "data.num_samples=240",  # 7 full batches of 32 and a short one of 16
    "data.num_test_samples=20",
    "data.input_shape=[1,6,6]",
    "model=convnet",
    "model.norm=batch",
    "model.widths=[4,6]",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)
THREE = ("hardware.devices=[cpu,cpu,cpu]", "balancing=manual", "balancing.weights=[28,0,4]")
TWO = ("hardware.devices=[cpu,cpu]", "balancing=manual", "balancing.weights=[7,1]")


def test_float64_steps_equal_one_device(train: Train) -> None:
    single = train("hardware=cpu", "strategy=single", *NET)
    assert "layers.0.1.running_var" in single.parameters()
    for options in [
        THREE,  # one of them without samples
        (*TWO, "trainer.activation_checkpointing=true"),
        (*TWO, "comm=gloo"),  # else the ranks share memory
        ("hardware=cpu", "strategy=single", "trainer.activation_checkpointing=true"),
    ]:
        loss, parameters = worst(train(*NET, *options), single, STEPS)
        assert loss <= 1e-12
        assert parameters <= 1e-12  # of all that is in the checkpoint
    run = train(*NET, *TWO, "strategy.sync_batch_norm=false")
    assert worst(run, single, STEPS)[1] > 1e-6
    assert "their statistics are each rank's own" in (run.folder / "logs" / "rank_0.log").read_text()


def test_a_compiled_net_waits_for_other_ranks_between_its_graphs(train: Train) -> None:
    net = [option for option in NET if "max_steps" not in option]
    single = train("hardware=cpu", "strategy=single", *net, "trainer.max_steps=3")
    loss, parameters = worst(train(*net, *TWO, "trainer.compile=true", "trainer.max_steps=3"), single, 3)
    assert loss <= 1e-12
    assert parameters <= 1e-12


@pytest.mark.parametrize("pacing", [(), ("hardware.devices=[emulated:rtx_3090,emulated:arc_a770]",)])
def test_ranks_with_several_passes_wait_for_none_that_has_fewer(
    train: Train, pacing: tuple[str, ...]
) -> None:
    """Six passes against one, a last batch that leaves a rank none; also where devices are paced."""
    common = [option for option in NET if "precision" not in option]
    run = train(*common, *TWO, *pacing, "trainer.microbatch_size=5", "trainer.max_steps=9")
    assert run.summary["status"] == "completed"
    assert run.parameters()["layers.0.1.num_batches_tracked"] == 7 * 6 + 3 + 6
    if not pacing:
        seconds = [device["idle_s"] for device in run.summary["devices"]]
        assert min(seconds) > 0
