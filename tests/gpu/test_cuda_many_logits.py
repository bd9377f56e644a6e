"""The loss of a large vocabulary on a real card: as exact as float32, by Triton and without."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hetexp.training.logits import many_logits
from hetexp.training.logits.many_logits import _compiled
from hetexp.training.loss import IGNORED, CrossEntropy

CARD = torch.device("cuda", 0)


@pytest.mark.parametrize("compiled", [True, False], ids=["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [3, 4096, 5001])
def test_half_precision_is_added_up_in_float32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, columns: int, compiled: bool
) -> None:
    monkeypatch.setattr(many_logits, "CHUNK", 4)
    if not compiled:
        monkeypatch.setattr(many_logits, "_kernels", lambda rows: None)
    elif _compiled(CARD) is None:
        pytest.skip("Triton does not run here")
    generator = torch.Generator().manual_seed(columns)
    logits = (8 * torch.randn(2, 33, columns, generator=generator)).to(dtype)
    logits[1, 2, 1:] = -torch.inf  # masked out
    targets = torch.randint(0, columns, (2, 33), generator=generator)
    targets[1, 2], targets[0, :3] = 0, IGNORED
    own, wide = logits.to(CARD).requires_grad_(), logits.double().requires_grad_()
    total = CrossEntropy().total(own, targets.to(CARD))
    wanted = functional.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double().cpu(), wanted, rtol=1e-6, atol=0)
    (total * 0.37).backward()
    (wanted * 0.37).backward()
    assert own.grad is not None and wide.grad is not None
    assert own.grad.dtype == dtype
    torch.testing.assert_close(own.grad.cpu(), wide.grad.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert not own.grad[0, :3].any()


def test_what_is_not_finite_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_logits, "CHUNK", 4)
    logits = torch.zeros(5, 4, dtype=torch.bfloat16, device=CARD)
    logits[3, 1] = torch.inf
    own = logits.requires_grad_()
    total = CrossEntropy().total(own, torch.zeros(5, dtype=torch.int64, device=CARD))
    assert not torch.isfinite(total)
    total.backward()
    assert own.grad is not None
    assert torch.isnan(own.grad[3]).any()
    assert torch.isfinite(own.grad[:3]).all()
