"""Ranks that walk a stream each must have drawn the same of it, up to rounding."""

from __future__ import annotations

import pytest
from support import plan_on, unbuilt_config

from hetexp.core.errors import HandshakeError
from hetexp.data.streams.stream import EPOCHS
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.training.streams import check_same_stream

PLAN = plan_on([CpuBackend.describe(0), CpuBackend.describe(1)], unbuilt_config())


def test_equal_samples_pass_and_so_does_rounding() -> None:
    check_same_stream(PLAN, [(EPOCHS + 32, 2.5), (EPOCHS + 32, 2.5 * (1 + 1e-7))])


def test_another_sample_names_the_rank() -> None:
    with pytest.raises(
        HandshakeError, match=r"rank 1 \(cpu:1\) has another sample .* sample 32 of epoch 1\."
    ):
        check_same_stream(PLAN, [(EPOCHS + 32, 2.5), (EPOCHS + 32, 2.6)])


def test_another_position_names_both() -> None:
    with pytest.raises(HandshakeError, match="sample 0 of epoch 2 on rank 1 .* sample 64 of epoch 1"):
        check_same_stream(PLAN, [(EPOCHS + 64, 2.5), (2 * EPOCHS, 2.5)])
