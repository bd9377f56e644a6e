"""BatchNorm over ranks with unequal shares is BatchNorm of one device with all samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fused_norm
import pytest
import torch
from fake_ranks import FakeGroup
from torch import Tensor, nn

from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.empty_share import EmptyShareGuard
from hetexp.model.recompute import recompute_layers
from hetexp.strategy.batch_norm import SynchronisedNorms


@pytest.fixture(autouse=True, params=["host", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How ranks exchange: through the host, or from device to device by torch's fused kernels."""
    torch.manual_seed(0)
    if request.param == "device":
        fused_norm.install(monkeypatch)
    return str(request.param)


def samples(count: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Later samples are far from the first: statistics of a part of them are wrong."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return (values + torch.arange(count).reshape(-1, *[1] * len(shape))).to(dtype)


def on_ranks(
    model: nn.Module, inputs: Tensor, shares: Sequence[int], passes: int = 1
) -> list[tuple[Tensor | None, nn.Module]]:
    """Let each rank of a group do its part of a step; return its last output and its model."""

    def rank_of(communicator: Communicator) -> tuple[Tensor | None, nn.Module]:
        own = copy.deepcopy(model)
        guard = EmptyShareGuard(own)
        norms = guard.norms = SynchronisedNorms(own, communicator)
        norms.record(inputs[:2])
        start = sum(shares[: communicator.rank])
        mine = inputs[start : start + shares[communicator.rank]]
        # As in training: whoever has fewer microbatches begins with passes without samples.
        pieces = list(mine.split(-(-len(mine) // passes))) if len(mine) else []
        output = None
        for piece in [None] * (passes - len(pieces)) + pieces:
            output = guard(piece)
            weigh(output).backward() if piece is not None else output.backward()
        return output, own

    return FakeGroup(len(shares)).run(rank_of)


def weigh(output: Tensor) -> Tensor:
    """A loss whose gradient is another one for each value."""
    return (output.sin() * torch.linspace(0.5, 2, output[0].numel()).reshape(output[0].shape)).sum()


def gradient(model: nn.Module, index: int) -> Tensor:
    found = list(model.parameters())[index].grad
    assert found is not None
    return found


def assert_same(
    ranks: Sequence[tuple[Tensor | None, nn.Module]], reference: nn.Module, tolerance: float
) -> None:
    """Gradients add up to the reference's, and every rank has its running statistics."""
    for index, parameter in enumerate(reference.parameters()):
        found = torch.stack([gradient(model, index) for _, model in ranks]).sum(0)
        assert parameter.grad is not None
        torch.testing.assert_close(found, parameter.grad, rtol=tolerance, atol=tolerance)
    for _, model in ranks:
        for (name, found), (_, wanted) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=name)
        for (_, found), (_, first) in zip(model.named_buffers(), ranks[0][1].named_buffers(), strict=True):
            assert torch.equal(found, first)


class Branched(nn.Module):
    """Two normalised branches that meet, one of them twice as long: its order is no list of parameters."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.last = nn.BatchNorm2d(3, **options)  # called last, registered first
        self.enter = nn.Conv2d(2, 3, 3)
        self.short = nn.BatchNorm2d(3, **options)
        self.long = nn.Sequential(
            nn.BatchNorm2d(3, **options), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, **options)
        )

    def forward(self, images: Tensor) -> Tensor:
        entered = self.enter(images)
        out: Tensor = self.last(self.short(entered) + self.long(entered).relu())
        return out


@pytest.mark.parametrize("shares", [(7, 1), (8, 0), (0, 8), (5, 0, 3), (1, 1, 6)])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_step_is_one_devices(shares: tuple[int, ...], recomputed: bool) -> None:
    model = nn.Sequential(Branched(), nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4)).double()
    reference, inputs = copy.deepcopy(model), samples(8, 2, 4, 4)
    weigh(reference(inputs)).backward()
    if recomputed:
        recompute_layers(model)
    ranks = on_ranks(model, inputs, shares)
    assert_same(ranks, reference, 1e-12)
    outputs = torch.cat(
        [out for (out, _), share in zip(ranks, shares, strict=True) if share and out is not None]
    )
    expected = copy.deepcopy(model)(inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.7, "eps": 0.1}],
)
def test_every_option_of_the_layer(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), Branched(**options).long).double()
    reference, inputs = copy.deepcopy(model), samples(8, 2, 4, 4)
    weigh(reference(inputs)).backward()
    assert_same(on_ranks(model, inputs, (5, 3)), reference, 1e-12)


def test_single_precision_and_half() -> None:
    layer = nn.BatchNorm1d(6)
    inputs = samples(8, 6, dtype=torch.float32)
    wanted = copy.deepcopy(layer)(inputs)
    (one, _), (other, _) = on_ranks(nn.Sequential(layer), inputs, (7, 1))
    assert one is not None
    assert other is not None
    torch.testing.assert_close(torch.cat([one, other]), wanted, rtol=1e-5, atol=1e-6)
    (one, model), (other, _) = on_ranks(nn.Sequential(layer), inputs.bfloat16(), (7, 1))
    assert one is not None
    assert other is not None
    assert one.dtype == torch.bfloat16
    assert model[0].weight.grad.dtype == torch.float32  # type: ignore[index]
    torch.testing.assert_close(torch.cat([one, other]).float(), wanted, rtol=0.05, atol=0.05)


def test_the_last_passes_of_all_ranks_belong_together() -> None:
    """One rank takes its six samples in three passes, the other its two in one."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    reference, inputs = copy.deepcopy(model), samples(8, 3)
    for rows in ([0, 1], [2, 3], [4, 5, 6, 7]):
        weigh(reference(inputs[rows])).backward()

    def one(communicator: Communicator) -> tuple[None, nn.Module]:
        own = copy.deepcopy(model)
        guard = EmptyShareGuard(own)
        norms = guard.norms = SynchronisedNorms(own, communicator)
        norms.record(inputs[:2])
        passes = [[0, 1], [2, 3], [4, 5]] if communicator.rank == 0 else [None, None, [6, 7]]
        for rows in passes:
            output = guard(inputs[rows] if rows is not None else None)
            (weigh(output) if rows is not None else output).backward()
        return None, own

    assert_same(FakeGroup(2).run(one), reference, 1e-12)


def test_frozen_layers_and_inputs_without_gradient() -> None:
    """The first layer's input wants no gradient, a frozen one has no weights to train: nobody may wait."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model[2].requires_grad_(False)
    reference, inputs = copy.deepcopy(model), samples(8, 3)
    weigh(reference(inputs)).backward()
    trained = [p.requires_grad for p in model.parameters()]
    ranks = on_ranks(model, inputs, (6, 2, 0))
    for index, wanted in enumerate(reference.parameters()):
        if trained[index]:
            found = torch.stack([gradient(rank, index) for _, rank in ranks]).sum(0)
            torch.testing.assert_close(found, wanted.grad, rtol=1e-12, atol=1e-12)
        else:
            assert [list(rank.parameters())[index].grad for _, rank in ranks] == [None, None, None]


@pytest.mark.parametrize("value", [None, 3.0])
def test_recording_leaves_the_model_as_it_was(value: float | None) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval()
    for parameter in model.parameters():
        parameter.grad = None if value is None else torch.full_like(parameter, value)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    SynchronisedNorms(model, SoloCommunicator()).record(samples(2, 3, dtype=torch.float32))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [module.training for module in model] == [True, False, True, True]
    assert torch.equal(torch.get_rng_state(), generator)
    for parameter in model.parameters():
        if value is None:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, torch.full_like(parameter, value))


def test_out_of_steps_a_layer_is_what_it_was() -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3))
    model = copy.deepcopy(plain)
    SynchronisedNorms(model, SoloCommunicator())
    inputs = samples(4, 3, dtype=torch.float32)
    assert torch.equal(model(inputs), plain(inputs))
    assert torch.equal(model.eval()(inputs), plain.eval()(inputs))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model[0], nn.modules.batchnorm._BatchNorm)


def test_a_single_value_is_refused_on_all_ranks() -> None:
    told: list[str] = []

    def rank_of(communicator: Communicator) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        guard = EmptyShareGuard(model)
        norms = guard.norms = SynchronisedNorms(model, communicator)
        norms.record(torch.randn(2, 3))
        with pytest.raises(ValueError, match="^1 normalises over the batch") as refused:
            guard(torch.randn(1, 3) if communicator.rank == 0 else None)
        told.append(str(refused.value))

    FakeGroup(2).run(rank_of)
    assert (
        told
        == [
            "1 normalises over the batch and needs more than one value a channel, but all ranks "
            "together have 1. Set trainer.drop_last=true, or a larger batch."
        ]
        * 2
    )


def test_ranks_at_different_layers_are_told(way: str) -> None:
    if way == "device":
        pytest.skip("the host would have to wait for the device")

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.one(inputs) if inputs[0, 0] > 0 else self.other(inputs)
            return out

    def rank_of(communicator: Communicator) -> None:
        model = Choosing()
        guard = EmptyShareGuard(model)
        guard.norms = SynchronisedNorms(model, communicator)
        with pytest.raises(
            RuntimeError, match=r"different BatchNorm layers: one on rank 0, other on rank 1\."
        ):
            guard(torch.full((4, 3), 1.0 - 2 * communicator.rank))

    FakeGroup(2).run(rank_of)


def test_waiting_for_others_is_told_apart() -> None:
    """Once a layer in forward and once in backward, whoever has samples and whoever has none."""
    waits = [0, 0]

    def counting(rank: int) -> Callable[[], Any]:
        @contextmanager
        def wait() -> Iterator[None]:
            waits[rank] += 1
            yield

        return wait

    def rank_of(communicator: Communicator) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        guard = EmptyShareGuard(model)
        norms = guard.norms = SynchronisedNorms(model, communicator, counting(communicator.rank))
        norms.record(torch.randn(2, 3))
        guard(torch.randn(4, 3) if communicator.rank == 0 else None).sum().backward()

    FakeGroup(2).run(rank_of)
    assert waits == [4, 4]


class WithActivation(nn.BatchNorm2d):
    """As timm's `BatchNormAct2d`: it counts the batches itself and calls the function."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        training = self.training or self.running_mean is None
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training, factor, self.eps
        ).relu()


class Doubled(nn.BatchNorm2d):
    """It goes on to torch's own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class SyncWithActivation(nn.SyncBatchNorm):
    """As timm's `SyncBatchNormAct`."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class OnOneDevice(nn.BatchNorm2d):
    """What `SyncWithActivation` computes, for a device without a group."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (WithActivation, {}),
        (WithActivation, {"momentum": None, "eps": 0.1}),
        (WithActivation, {"track_running_stats": False, "affine": False}),
        (Doubled, {}),
        (SyncWithActivation, {}),
    ],
)
@pytest.mark.parametrize("recomputed", [False, True])
def test_layers_with_a_forward_of_their_own(
    kind: type[nn.Module], options: dict[str, Any], recomputed: bool
) -> None:
    def net(norm: type[nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 3, 3), norm(3, **options), nn.Conv2d(3, 3, 1), norm(3, **options)]
        return nn.Sequential(*layers, nn.BatchNorm2d(3)).double()

    model, inputs = net(kind), samples(8, 2, 4, 4)
    reference = net(OnOneDevice if kind is SyncWithActivation else kind)
    for _ in range(2):
        weigh(reference(inputs)).backward()
    if recomputed:
        recompute_layers(model)

    def rank_of(communicator: Communicator) -> tuple[Tensor | None, nn.Module]:
        own = copy.deepcopy(model)
        guard = EmptyShareGuard(own)
        norms = guard.norms = SynchronisedNorms(own, communicator)
        norms.record(inputs[:2])
        mine = [inputs[:5], inputs[5:], None][communicator.rank]
        for _ in range(2):
            output = guard(mine)
            (output if mine is None else weigh(output)).backward()
        return output, own

    ranks = FakeGroup(3).run(rank_of)
    assert_same(ranks, reference, 1e-12)
    shown = copy.deepcopy(ranks[0][1]).eval()
    torch.testing.assert_close(shown(inputs), reference.eval()(inputs), rtol=1e-12, atol=1e-12)


def test_a_layer_that_normalises_by_itself_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class ByItself(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return (input - input.mean(0)) / (input.std(0) + 1)

    on_ranks(nn.Sequential(nn.Conv2d(2, 3, 1), ByItself(3)).double(), samples(8, 2, 4, 4), (5, 3))
    assert [
        record.message
        for record in caplog.records
        if "ByItself" in record.message and "1 is" in record.message
    ]
