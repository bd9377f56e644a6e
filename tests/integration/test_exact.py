"""S9: the gradient of a step equals one device's on the whole global batch, for any split."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import own_loop
import pytest
import torch
from support import Run, Train, difference, start_run, worst
from torch.nn import functional

from hetexp.core.instantiate import instantiate
from hetexp.core.plan import Plan
from hetexp.data.sampler import GlobalSampler, Position
from hetexp.training.loss import IGNORED

STEPS = 20
SYNTHETIC = ("data=synthetic", "data.num_samples=240", "data.num_test_samples=50")
MLP = (*SYNTHETIC, "model=mlp", "model.hidden_sizes=[32]")
REGRESSION = (*MLP, "data.kind=regression", "trainer.loss=mse")
GPT = (
    *SYNTHETIC,
    "data.kind=tokens",
    "data.mask_fraction=0.6",
    "model=gpt",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.embedding_size=16",
    "model.tie_weights=true",
)
COMMON = (
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)
EXPERTS = (*GPT, "model.num_experts=3", "model.balance_weight=0.1")
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
    pytest.param(MLP, split(24, 8), (), id="mlp-24/8"),
    pytest.param(MLP, split(31, 1), ("trainer.accumulate=2",), id="mlp-31/1-accumulate2"),
    pytest.param(MLP, split(32, 0), (), id="mlp-32/0"),
    pytest.param(MLP, split(20, 9, 3), ("trainer.accumulate=3",), id="mlp-20/9/3-accumulate3"),
    pytest.param(
        MLP, split(24, 8), ("trainer.microbatch_size=8", "trainer.clip_norm=0.3"), id="mlp-24/8-3:1-clip"
    ),
    pytest.param(REGRESSION, split(6, 2), (), id="mse-6/2"),
    pytest.param(GPT, split(24, 8), (), id="gpt-24/8"),
    pytest.param(
        GPT, split(20, 9, 3), ("trainer.accumulate=4", "trainer.clip_norm=0.5"), id="gpt-20/9/3-4-clip"
    ),
    pytest.param(GPT, split(31, 1), ("strategy.bucket_cap_mb=0.01",), id="gpt-31/1-buckets"),
    pytest.param(GPT, split(32, 0), ("trainer.accumulate=2",), id="gpt-32/0-accumulate2"),
    pytest.param(
        GPT,
        split(24, 0, 8),
        ("trainer.accumulate=2", "trainer.activation_checkpointing=true"),
        id="gpt-24/0/8-recompute",
    ),
    pytest.param(EXPERTS, split(20, 9, 3), ("trainer.accumulate=2",), id="experts-20/9/3-accumulate2"),
]


@pytest.mark.parametrize(("model", "layout", "options"), CASES)
def test_float64_steps_equal_one_device(
    train: Train, single: Callable[..., Run], model: Options, layout: Options, options: Options
) -> None:
    # 240 samples are 7 full batches of 32 and a short one of 16, so 20 steps contain two short ones.
    clip = tuple(option for option in options if "clip" in option)
    reference = single(*model, *COMMON, *clip)
    loss, parameters = worst(train(*model, *COMMON, *layout, *options), reference, STEPS)
    assert loss <= 1e-12
    assert parameters <= 1e-12


WEIGHTED = (*MLP, "data.num_classes=3", "trainer.loss=own_loop.Weighted", "optimizer=sgd")
LOCAL = ("strategy.sync_every=1",)
WEIGHTED_ON = {
    "ddp": (*split(5, 2, 1), "trainer.accumulate=2"),
    "local_sgd": (*split(5, 2, 1), *LOCAL),
    "hierarchical_sgd": (*split(5, 2, 1), *LOCAL, "strategy.groups=[[0,1],[2]]"),
    "pipeline": split(1, 1),
    "hybrid": (*split(5, 2, 1), "strategy.groups=[[0,1],[2]]"),
}


@pytest.mark.parametrize("strategy", WEIGHTED_ON)
def test_weighted_elements_equal_one_device(train: Train, single: Callable[..., Run], strategy: str) -> None:
    """The mean is taken over a sum of weights: no rank's count is whole."""
    reference = single(*WEIGHTED, *COMMON, "trainer.max_steps=8")
    run = train(*WEIGHTED, *COMMON, "trainer.max_steps=8", f"strategy={strategy}", *WEIGHTED_ON[strategy])
    loss, parameters = worst(run, reference, 8)
    assert loss <= 1e-12
    assert parameters <= 1e-12
    evaluations = [one.summary["final"]["eval"]["loss"] for one in (run, reference)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-12)


def test_weighted_elements_have_the_mean_of_torch(single: Callable[..., Run]) -> None:
    run = single(*WEIGHTED, *COMMON, "trainer.max_steps=8")
    config = Plan.read(run.folder / "plan.json").config
    data = instantiate(config["data"])
    model = instantiate(config["model"] | data.facts).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["optimizer"]["lr"])
    sampler, position = GlobalSampler(240, 32, 0), Position()
    for step in range(1, 9):
        indices, position = sampler.batch(position)
        inputs, targets = (torch.stack(list(each)) for each in zip(*(data.train[i] for i in indices)))
        if step > 1:  # what the first step begins with is not saved
            loss = functional.cross_entropy(model(inputs.double()), targets, own_loop.CLASS_WEIGHTS)
            assert run.losses[step - 1] == pytest.approx(loss.item(), rel=1e-12)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert difference(model.state_dict(), run.parameters(step)) <= 1e-12
        model.load_state_dict(run.parameters(step))


@pytest.mark.parametrize("model", [MLP, GPT], ids=["mlp", "gpt"])
def test_without_the_normaliser_it_fails(train: Train, single: Callable[..., Run], model: Options) -> None:
    reference = single(*model, *COMMON)
    run = train(*model, *COMMON, *split(24, 8), "debug.normalizer=per_rank")
    assert worst(run, reference, STEPS)[1] > 1e-6


def test_float32_differs_no_more_than_microbatches_do(train: Train) -> None:
    common = [option for option in COMMON if "precision" not in option]
    one, *others = (
        train("hardware=cpu", "strategy=single", *GPT, *common, f"trainer.accumulate={n}") for n in (1, 2, 4)
    )
    allowed = 2 * max(worst(other, one, STEPS)[1] for other in others)
    assert 0 < allowed < 1e-3
    assert worst(train(*GPT, *common, *split(24, 8)), one, STEPS)[1] <= allowed


def test_the_gpt_is_tied_and_masked(train: Train) -> None:
    """What the runs above rely on is really there: one tensor for both ends, unequal numbers of tokens."""
    node = {"_target_": "hetexp.data.synthetic.Synthetic", "kind": "tokens", "mask_fraction": 0.6}
    counts = torch.stack([(targets != IGNORED).sum() for _, targets in instantiate(node).train])
    assert counts.double().std() > 1
    sizes = [
        sum(
            tensor.numel()
            for tensor in train(
                *GPT,
                f"model.tie_weights={tied}",
                "debug=fast",
                "trainer.fast_dev_run=0",
                "trainer.max_steps=1",
                "hardware=cpu",
            )
            .parameters()
            .values()
        )
        for tied in ("true", "false")
    ]
    assert sizes[1] - sizes[0] == 32 * 16  # vocabulary × embedding
