"""Models with lazy layers, sparse or complex gradients and spectral norms train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import unusual_loop
from support import Run, Train, difference, start_run, start_script, worst

from hetexp.core.errors import ConfigError, RunFailedError

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
LAZY = (*VECTORS, "model._target_=unusual_models.Lazy", "optimizer=sgd")
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
    pytest.param(LAZY, split(3, 1, 0), (), id="lazy-3:1:0"),
    pytest.param(
        SPARSE, split(3, 1), ("trainer.accumulate=3", "trainer.check_sync_every=1"), id="sparse-accumulate3"
    ),
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


@pytest.mark.parametrize("model", [SPARSE, COMPLEX], ids=["sparse", "complex"])
@pytest.mark.parametrize(
    "way",
    [
        (*split(3, 1), "comm.wire=int8"),
        ("hardware.devices=[emulated:rtx_3090,emulated:arc_a770]",),
    ],
    ids=["int8", "emulated"],
)
def test_they_travel_compressed_and_at_the_pace_of_links(train: Train, model: Options, way: Options) -> None:
    run = train(*model, *COMMON, "trainer.precision=float32", "trainer.max_steps=3", *way)
    assert run.losses[-1] < run.losses[0]
    assert run.summary["comm"]["bytes_per_step"] > 0


def test_a_complex_model_goes_on_from_its_checkpoint(train: Train, single: Callable[..., Run]) -> None:
    whole = single(*COMPLEX, *COMMON)
    checkpoint = whole.folder / "checkpoints" / "step_00000002"
    run = train(*COMPLEX, *COMMON, *split(3, 1), f"resume={checkpoint}")
    assert difference(run.parameters(), whole.parameters()) <= 1e-12
    # Real and imaginary parts, both trained.
    moved = (whole.parameters()["weight"] - whole.parameters(1)["weight"]).abs()
    assert bool((moved > 1e-6).all())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            (*VECTORS, "model._target_=unusual_models.Unfinished"),
            "spare.weight, spare.bias are of lazy layers",
        ),
        ((*SPARSE, "optimizer=adamw"), "`optimizer._target_` must be torch.optim.SGD or Adagrad"),
        ((*SPARSE, "optimizer._target_=torch.optim.SparseAdam"), "The gradient of head.weight is dense"),
        ((*TOKENS, "model._target_=unusual_models.OwnSparse", "optimizer=sgd"), "to_dense"),
    ],
    ids=["lazy", "adamw", "sparse-adam", "own-sparse"],
)
def test_what_cannot_train_is_said_in_a_sentence(train: Train, options: Options, sentence: str) -> None:
    with pytest.raises(RunFailedError) as caught:
        train(*options, *COMMON, *split(3, 1))
    assert sentence in str(caught.value)


def test_buffers_of_a_ranks_own_samples_are_named_once(train: Train) -> None:
    model = (*VECTORS, "model._target_=unusual_models.RunningMean")
    run = train(*model, *COMMON, *split(3, 1))
    text = (run.folder / "logs" / "rank_0.log").read_text()
    assert text.count("The model changes mean in training by each rank's own samples") == 1
    assert "constant" not in text
    for others in (LAZY, (*LIPSCHITZ, "+model.batch_norm=true", "trainer.microbatch_size=5")):
        quiet = train(*others, *COMMON, *split(1, 1)[:1], "trainer.max_steps=2")
        assert "The model changes" not in (quiet.folder / "logs" / "rank_0.log").read_text()


@pytest.mark.parametrize("case", ["lazy", "sparse", "spectral"])
@pytest.mark.parametrize("weights", [(3, 1, 0), (0, 1)], ids=["3:1:0", "0:1"])
def test_a_script_of_ones_own_equals_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, weights: tuple[int, ...]
) -> None:
    script = Path(unusual_loop.__file__)
    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", [str(script), case, str(tmp_path)])
        unusual_loop.main()
    start_script(tmp_path / "run", script, split(*weights), case, str(tmp_path))
    alone = torch.load(tmp_path / "1_0.pt")
    for rank in range(len(weights)):
        assert difference(torch.load(tmp_path / f"{len(weights)}_{rank}.pt"), alone) <= 1e-12


def test_a_training_begins_with_given_weights(train: Train, single: Callable[..., Run]) -> None:
    whole = single(*COMPLEX, *COMMON)
    weights = f"+model.weights={whole.folder / 'checkpoints' / 'step_00000003'}"
    still = ("optimizer=sgd", "optimizer.lr=0", "trainer.max_steps=1")
    run = train(*COMPLEX, *COMMON, *split(3, 1), *still, weights)
    assert difference(run.parameters(), whole.parameters(3)) <= 1e-15
    with pytest.raises(ConfigError, match=r"`model\.weights` must be an existing file or folder"):
        train(*COMPLEX, *COMMON, *split(3, 1), "+model.weights=/nowhere")
