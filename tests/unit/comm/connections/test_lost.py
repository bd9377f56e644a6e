"""Which errors another rank's end explains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

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


RESET = "Connection reset by peer"


def raised(function: Callable[[], Any]) -> RuntimeError:
    with pytest.raises(RuntimeError, match=RESET) as caught:
        function()
    return caught.value


def own_code() -> None:
    raise RuntimeError(f"{RESET} while this sample was downloaded")


class Samples:
    """Samples from a server, whose library is compiled: its error has no `raise`."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> None:
        torch.device(RESET)  # refuses its argument, and says which


def test_the_text_of_the_rank_s_own_code_blames_no_other() -> None:
    assert not is_peer_lost(raised(own_code))
    assert not is_peer_lost(raised(lambda: next(iter(DataLoader(Samples())))))  # type: ignore[arg-type]


def test_a_collective_s_error_blames_another() -> None:
    """Its innermost frame is the call, in the user's code or in torch's backward."""
    assert is_peer_lost(raised(lambda: torch.device(RESET)))

    def backward() -> None:
        number = torch.ones((), requires_grad=True)
        number.register_hook(lambda _: torch.device(RESET))
        number.sin().backward()

    assert is_peer_lost(raised(backward))
