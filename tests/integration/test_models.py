"""Models with lazy layers, sparse or complex gradients and spectral norms train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from support import Run, Train, start_run, worst

STEPS = 6
VECTORS = ("data=synthetic", "data.num_samples=72", "data.num_test_samples=20", "model=custom")
TOKENS = (*VECTORS, "data.kind=tokens", "data.mask_fraction=0.5", "data.sequence_length=5")
COMMON = (
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",  # 72 samples: the third batch has 8
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)
LAZY = (*VECTORS, "model._target_=unusual_models.Lazy", "strategy.find_unused_parameters=false")
SPARSE = (*TOKENS, "model._target_=unusual_models.SparseWords", "optimizer=sgd", "optimizer.lr=0.5")
COMPLEX = (*VECTORS, "model._target_=unusual_models.Spectral")
LIPSCHITZ = (*VECTORS, "model._target_=unusual_models.Lipschitz")
Options = tuple[str, ...]


def split(*counts: int) -> Options:
    devices = ",".join(["cpu"] * len(counts))
    weights = ",".join(map(str, counts))
    return f"hardware.devices=[{devices}]", "balancing=manual", f"balancing.weights=[{weights}]"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """The reference: one device, the whole batch in one piece; trained once for all that compare with it."""

    @cache
    def start(*overrides: str) -> Run:
        folder = tmp_path_factory.mktemp("single") / "run"
        return start_run(folder, ("hardware=cpu", "strategy=single", *overrides))

    return start


CASES = [
    pytest.param(SPARSE, split(3, 1), (), id="sparse-3:1"),
    pytest.param(
        SPARSE, split(31, 1, 0), ("trainer.accumulate=2", "trainer.clip_norm=0.2"), id="sparse-31:1:0"
    ),
    pytest.param(SPARSE, split(0, 1), ("comm=gloo",), id="sparse-0:1-gloo"),
    pytest.param(SPARSE, split(3, 1), ("strategy=local_sgd", "strategy.sync_every=1"), id="sparse-local_sgd"),
    pytest.param(COMPLEX, split(3, 1), ("trainer.clip_norm=0.2",), id="complex-3:1"),
    pytest.param(COMPLEX, split(1, 0), ("comm=gloo", "trainer.accumulate=2"), id="complex-1:0-gloo"),
    pytest.param(
        COMPLEX,
        split(3, 1),
        ("strategy=local_sgd", "strategy.sync_every=1", "optimizer=sgd"),
        id="complex-local_sgd",
    ),
    pytest.param(LIPSCHITZ, split(3, 1), (), id="spectral-3:1"),
    pytest.param(LIPSCHITZ, split(0, 1), (), id="spectral-0:1"),
    # Not AdamW: it divides the rounding of the first bias, whose gradient BatchNorm makes 0.
    pytest.param(
        (*LIPSCHITZ, "+model.batch_norm=true"),
        split(0, 3, 1),
        ("optimizer=sgd",),
        id="spectral-batch-norm-0:3:1",
    ),
]


@pytest.mark.parametrize(("model", "layout", "options"), CASES)
def test_they_equal_one_device(
    train: Train, single: Callable[..., Run], model: Options, layout: Options, options: Options
) -> None:
    shared = tuple(option for option in options if option.startswith(("trainer.clip", "optimizer")))
    reference = single(*model, *COMMON, *shared)
    loss, parameters = worst(train(*model, *COMMON, *layout, *options), reference, STEPS)
    assert loss <= 1e-12
    assert parameters <= 1e-12
