"""The sparse autoencoder by itself: gradients, what each activation keeps, how features begin anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hetexp.core.errors import ConfigError
from hetexp.model.hooks import Probe, Shared
from hetexp.model.jump import jump, step
from hetexp.model.layered import pieces_of
from hetexp.model.sae import SAE


def built(**arguments: Any) -> SAE:
    torch.manual_seed(0)
    return SAE(**{"input_size": 6, "num_features": 10, "k": 3} | arguments).double()


def vectors(count: int = 20) -> torch.Tensor:
    return torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_it_begins_tied_with_rows_of_length_1() -> None:
    sae = built(mean=[1.0, 2, 3, 4, 5, 6])
    assert torch.equal(sae.W_enc, sae.W_dec.T)
    assert sae.W_dec.norm(dim=1).tolist() == pytest.approx([1.0] * 10, abs=1e-6)
    assert sae.b_dec.tolist() == [1.0, 2, 3, 4, 5, 6]
    assert not torch.equal(built(tied_init=False).W_enc, sae.W_enc)


def test_what_each_activation_keeps() -> None:
    x = vectors()
    relu = built(activation="relu", l1_coefficient=0.5)
    before = (x - relu.b_dec) @ relu.W_enc + relu.b_enc
    out = relu(x)
    assert torch.equal(relu.encode(x), before.clamp(min=0))
    assert torch.allclose(out.auxiliary, 0.5 * before.clamp(min=0).sum(dim=1))
    assert torch.equal(out.tally, before > 0)
    topk = built(activation="topk").encode(x)
    kept = topk > 0
    assert (kept.sum(dim=1) <= 3).all()
    assert torch.equal(topk[kept], before[kept])
    assert (
        torch.where(kept, topk, torch.inf).min(dim=1).values >= before.masked_fill(kept, 0).max(dim=1).values
    ).all()
    jumps = built(activation="jumprelu", threshold=0.7, l0_coefficient=2.0)(x)
    assert torch.equal(jumps.tally, before > jumps_threshold(0.7))
    assert torch.equal(jumps.auxiliary, 2.0 * jumps.tally.sum(dim=1).double())


def jumps_threshold(value: float) -> float:
    return float(torch.tensor(value).double())  # as a float32 parameter holds it


def test_the_gradient_of_a_jump_is_the_papers() -> None:
    values = torch.tensor([[0.2, 0.9], [1.05, 3.0]], dtype=torch.float64, requires_grad=True)
    threshold = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    (jump(values, threshold, 0.5) * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert values.grad is not None and threshold.grad is not None
    assert values.grad.tolist() == [[0.0, 0.0], [3.0, 4.0]]
    assert threshold.grad.tolist() == [-1.0 / 0.5 * 3.0, -1.0 / 0.5 * 2.0]  # only 1.05 and 0.9 are near
    threshold.grad = None
    step(values, threshold, 0.5).sum().backward()
    assert threshold.grad is not None
    assert threshold.grad.tolist() == [-2.0, -2.0]


def test_the_gradient_has_nothing_along_a_row_and_rows_keep_their_length() -> None:
    sae = built(activation="relu")
    optimizer = torch.optim.Adam(sae.parameters(), lr=0.1)
    for _ in range(3):
        x = vectors()
        optimizer.zero_grad()
        (sae(x).output - x).square().sum().backward()
        assert sae.W_dec.grad is not None
        assert (sae.W_dec.grad * sae.W_dec).sum(dim=1).abs().max() > 1e-3
        with torch.no_grad():
            sae.project_gradients()
            assert (sae.W_dec.grad * sae.W_dec).sum(dim=1).abs().max() < 1e-12
            optimizer.step()
            assert (sae.W_dec.norm(dim=1) - 1).abs().max() > 1e-3
            sae.after_update()
        assert (sae.W_dec.norm(dim=1) - 1).abs().max() < 1e-14


def shared(step: int, fired: list[int], probe: Probe | None = None, samples: int = 4) -> Shared:
    tally = torch.zeros(10, dtype=torch.int64)
    tally[fired] = 1
    return Shared(step, step - 1, samples, tally, probe)


def probe(x: torch.Tensor, sae: SAE) -> Probe:
    def take(places: Any) -> torch.Tensor:
        return x[list(places)]

    return Probe(sae.scores(x, x).detach(), take, np.random.default_rng(0))


def test_dead_features_begin_anew_and_nothing_else_changes() -> None:
    sae = built(activation="jumprelu", dead_after=8, resample_every=2, resample_until=4)
    optimizer = torch.optim.Adam(sae.parameters(), lr=0.01)
    x = vectors()
    (sae(x).output - x).square().sum().backward()
    sae.threshold.grad = torch.ones_like(sae.threshold)
    optimizer.step()
    with torch.no_grad():
        sae.after_update()
        first, second = shared(1, [0, 1, 2, 3, 4]), shared(2, [0, 1, 2, 3, 4, 5])
        assert sae.probe_size(first) == 0  # not at this step
        sae.after_step(first, optimizer)
        assert sae.since_fired.tolist() == [0] * 5 + [4] * 5
        assert sae.probe_size(second) == sae.resample_candidates
        before = {name: value.clone() for name, value in sae.state_dict().items()}
        moments = optimizer.state[sae.W_enc]["exp_avg"].clone()
        found = probe(x, sae)
        sae.after_step(Shared(2, 1, 4, second.tally, found), optimizer)
    assert sae.since_fired.tolist() == [0] * 10
    assert int(sae.seen) == int(sae.firings.sum()) == 0  # a window has ended
    for name in ("W_dec", "b_enc", "threshold"):
        assert torch.equal(sae.state_dict()[name][:6], before[name][:6])
        assert not torch.equal(sae.state_dict()[name][6:], before[name][6:])
    assert torch.equal(sae.W_enc[:, :6], before["W_enc"][:, :6])
    rows = (x - sae.b_dec).detach()
    cosines = torch.nn.functional.cosine_similarity(sae.W_dec[6:, None], rows[None], dim=2)
    assert cosines.max(dim=1).values.tolist() == pytest.approx([1.0] * 4)
    lengths = sae.W_enc.norm(dim=0)
    assert lengths[6:].tolist() == pytest.approx([0.2 * float(lengths[:6].mean().detach())] * 4)
    assert torch.equal(optimizer.state[sae.W_enc]["exp_avg"][:, :6], moments[:, :6])
    for parameter, dim in ((sae.W_enc, 1), (sae.W_dec, 0), (sae.b_enc, 0), (sae.threshold, 0)):
        for key in ("exp_avg", "exp_avg_sq"):
            assert not optimizer.state[parameter][key].transpose(0, dim)[6:].any()
    sae.since_fired.fill_(100)
    assert sae.probe_size(shared(6, [])) == 0  # after `resample_until`


def test_fewer_samples_than_dead_features() -> None:
    sae = built(activation="relu", dead_after=1, resample_every=1)
    optimizer = torch.optim.SGD(sae.parameters(), lr=0.01)
    x = vectors(3)
    with torch.no_grad():
        sae.after_step(shared(1, [], probe(x, sae)), optimizer)
    assert sae.since_fired.tolist() == [0, 0, 0] + [4] * 7


def test_metrics_are_of_sums_and_any_cut_gives_the_same() -> None:
    sae = built(activation="topk", dead_after=5).eval()
    sae.since_fired[:3] = 5
    x = vectors()
    with torch.no_grad():
        whole = sae.metrics(sae.measure(x, x, sae(x)))
        cut = sae.metrics(sum((sae.measure(p, p, sae(p)) for p in x.split([1, 16, 3])), torch.tensor(0.0)))
        error = (sae(x).output - x).square().sum()
        expected = 1 - error / (x - x.mean(dim=0)).square().sum()
        l0 = (sae.encode(x) > 0).sum() / 20
    assert cut == pytest.approx(whole, rel=1e-13)
    assert whole == pytest.approx(
        {
            "l0": float(l0),
            "explained_variance": float(expected),
            "reconstruction": float(error) / 20,
            "dead_fraction": 0.3,
        },
        rel=1e-6,
    )
    assert tuple(whole) == SAE.measures


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`model.k` must be at most `model.num_features` \(10\)"):
        built(activation="topk", k=11)
    with pytest.raises(ConfigError, match="model.input_size"):
        SAE()
    assert pieces_of(built()) is None  # no pipeline may cut it
