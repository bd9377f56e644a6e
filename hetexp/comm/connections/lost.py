"""Recognises errors of torch that mean that another rank is gone: torch has no class for them."""

from __future__ import annotations

import dis
from types import TracebackType

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
_LOADING = ("hetexp.data.", "torch.utils.data.")
"""Modules that load samples, in which no collective runs."""
_COLLECTIVES = ("hetexp.", "torch.")
"""Modules that call collectives and raise what these report; others may only call them."""


def is_peer_lost(error: BaseException) -> bool:
    """Return whether a rank failed only because another one was gone or late.

    torch has no class for it, and its text alone does not show it: a data set may say, too, that a connection
    was reset. So the error must come from a collective (`_from_elsewhere`).
    """
    if isinstance(error, PeerLostError):
        return True
    text = str(error)
    signs = isinstance(error, RuntimeError) and any(sign in text for sign in PEER_LOST_SIGNS)
    return signs and not _from_elsewhere(error.__traceback__)


def _from_elsewhere(trace: TracebackType | None) -> bool:
    """Return whether an error was raised while samples were loaded, or by a `raise` of the user's code."""
    raised = False
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__"))
        if name.startswith(_LOADING):
            return True
        # Of an error of C++, the innermost frame has the call.
        by_statement = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
        raised = by_statement and not name.startswith(_COLLECTIVES)
        trace = trace.tb_next
    return raised
