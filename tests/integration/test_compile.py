"""A compiled model takes the steps of the same model as it is, and its checkpoint is no other."""

from __future__ import annotations

from support import Train, difference

STEPS = 8
NET = (
    "data=synthetic",
    "data.num_samples=80",  # every third batch is a short one
    "data.num_test_samples=20",
    "model=mlp",
    "model.hidden_sizes=[8]",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)
SHARES = ("hardware.devices=[cpu,cpu,cpu]", "balancing=manual", "balancing.weights=[28,0,4]")


def test_compiled_steps_equal_one_device(train: Train) -> None:
    """Batch sizes of 10, 9, 5, 4, 2 and 1, and none."""
    single = train("hardware=cpu", "strategy=single", *NET, f"trainer.max_steps={STEPS + 1}")
    run = train(*NET, *SHARES, "trainer.compile=true", "trainer.accumulate=3", f"trainer.max_steps={STEPS}")
    assert len(run.losses) == STEPS
    loss = max(abs(a - b) / abs(b) for a, b in zip(run.losses, single.losses[:STEPS], strict=True))
    assert loss <= 1e-12
    for step in range(1, STEPS + 1):
        assert difference(run.parameters(step), single.parameters(step)) <= 1e-12
    # The checkpoint tells nothing of how it was trained: `single` goes on from it.
    more = train(
        "hardware=cpu", "strategy=single", *NET, f"trainer.max_steps={STEPS + 1}", f"resume={run.folder}"
    )
    assert difference(more.parameters(STEPS + 1), single.parameters(STEPS + 1)) <= 1e-12
