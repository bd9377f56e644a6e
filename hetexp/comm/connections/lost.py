"""Recognises errors of torch that mean that another rank is gone: torch has no class for them."""

from __future__ import annotations

from hetexp.core.errors import PeerLostError

PEER_LOST_SIGNS = (
    "of the exchange is gone",
    "of the exchange did not come",
    "another rank is gone or late",
    "the members of this training have changed",
    "gloo",
    "nccl",
    "NCCL communicator was aborted",
    "NCCL Async Error",  # with the next two of torch's newer class for NCCL (2.14.1)
    "NCCL operation failed",
    "NCCL operation timed out",
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "ProcessGroup",
)
"""Texts of torch's errors when a collective inside DDP fails. Of a hook's error torch keeps only the text."""


def is_peer_lost(error: BaseException) -> bool:
    """Return whether a rank failed only because another one was gone or late."""
    if isinstance(error, PeerLostError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in PEER_LOST_SIGNS)
