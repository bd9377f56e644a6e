"""Who runs: the task, the mixes, and each strategy with each policy that makes a difference to it."""

from __future__ import annotations

from dataclasses import dataclass

from balance_bench.mixes import Mix

SYNC_EVERY = 10
"""Steps between the exchanges of `local_sgd`: several of them in a short run."""
EVAL_EVERY = 10
"""A multiple of it, so that every strategy has one model to evaluate then."""

TASK = [
    "model=gpt",
    "model.num_layers=6",
    "model.num_heads=2",
    "model.embedding_size=64",
    "model.tie_weights=true",
    "data=text",
    "data.sequence_length=32",
    "data.test_fraction=0.01",
    "optimizer.lr=0.003",
    "optimizer.fused=true",
    "trainer.max_epochs=null",
    f"trainer.eval_every={EVAL_EVERY}",
    "trainer.log_every=5",
    "hardware.threads_per_rank=1",
    "launch.start_method=forkserver",
    "logger=none",
]

MIXES = {
    "3:1": Mix("3:1", ("three", "one"), 64, 500, 0.4),
    "4 cards": Mix("4 mixed cards", ("rtx_4090", "rtx_3090", "arc_a770", "rx_6600"), 64, 600, 0.4),
}


@dataclass(frozen=True)
class Entrant:
    """One row of the table."""

    strategy: str
    policy: str | None
    """`None` where the strategy leaves nothing to share."""
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """Mixes that it is for; empty: all."""

    @property
    def name(self) -> str:
        options = [text.partition("=") for text in self.overrides if not text.startswith("balancing")]
        shown = [f"{key.removeprefix('strategy.')}={value}" for key, _, value in options]
        return " ".join([self.strategy, *shown])

    def words(self) -> list[str]:
        """Return what a person would type for it."""
        policy = [] if self.policy is None else [f"balancing={self.policy}"]
        return [f"strategy={self.strategy}", *policy, *self.overrides]


_SYNC = (f"strategy.sync_every={SYNC_EVERY}",)
_SPEED = (*_SYNC, "strategy.local_steps=speed")
ENTRANTS = [
    Entrant("single", None),
    *(Entrant("ddp", policy) for policy in ("equal", "tflops", "profiled", "auto")),
    *(Entrant("local_sgd", policy, _SYNC) for policy in ("equal", "tflops", "auto")),
    Entrant("local_sgd", "tflops", _SPEED),
    *(Entrant("independent", policy) for policy in ("equal", "tflops")),
    *(Entrant("pipeline", policy) for policy in ("equal", "tflops", "auto")),
    *(Entrant("hybrid", policy, only=("4 cards",)) for policy in ("tflops", "auto")),
    Entrant("auto", "auto"),
]


def entrants_of(mix: str) -> list[Entrant]:
    """Return the rows of a mix."""
    return [one for one in ENTRANTS if not one.only or mix in one.only]
