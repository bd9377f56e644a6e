"""Which errors another rank's end explains."""

from __future__ import annotations

import pytest

from hetexp.comm.connections.lost import is_peer_lost
from hetexp.core.errors import ConfigError, PeerLostError


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError("rank 1 gave no sign of life for 3 s"),
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        RuntimeError("NCCL Async Error: remote process exited or there was a network error"),
        RuntimeError("NCCL operation timed out"),
        RuntimeError("PeerLostError: rank 2 of the exchange is gone"),
        RuntimeError("PeerLostError: the members of this training have changed while ['x'] did not come"),
    ],
)
def test_a_peer_is_lost(error: Exception) -> None:
    assert is_peer_lost(error)


@pytest.mark.parametrize(
    "error", [ConfigError("gloo"), ValueError("Broken pipe"), RuntimeError("CUDA error: out of memory")]
)
def test_it_is_the_rank_s_own(error: Exception) -> None:
    assert not is_peer_lost(error)
