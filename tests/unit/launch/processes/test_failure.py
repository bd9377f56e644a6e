"""Why a rank failed, in one line."""

from __future__ import annotations

import traceback

import pytest

from hetexp.launch.processes.failure import RankFailure, first_cause


def raised(error: Exception) -> RankFailure:
    try:
        try:
            raise KeyError("an earlier error")
        except KeyError:
            raise error from None
    except Exception as caught:
        return RankFailure(0, type(caught).__name__, traceback.format_exc())


class OwnError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            TypeError("Could not run 'aten::view'.\n\nCPU: registered at a.cpp\n to Tensor"),
            "Could not run 'aten::view'.",
        ),
        (ValueError("short"), "short"),
        (OwnError("first\nTypeError: not this\nlast"), "first"),
    ],
)
def test_a_traceback_ends_in_the_first_line_of_its_message(error: Exception, reason: str) -> None:
    failure = raised(error)
    assert failure.reason.endswith(f"{failure.kind}: {reason}")
    assert "\n" not in failure.reason


def test_an_error_without_a_message_is_named() -> None:
    assert raised(AssertionError()).reason == "AssertionError"


def test_what_is_no_traceback_ends_in_its_last_line() -> None:
    text = "End of its log:\none\ntwo\nkilled by SIGKILL; the last it said: two"
    assert RankFailure(0, "SIGKILL", text).reason == "killed by SIGKILL; the last it said: two"
    assert RankFailure(0, "ConfigError", "").reason == "ConfigError"


def test_the_first_cause_is_of_a_rank_that_lost_no_peer() -> None:
    noticed = RankFailure(0, "PeerLostError", "rank 1 is gone", peer_lost=True, time=1.0)
    cause = RankFailure(1, "KeyError", "'weights'", time=2.0)
    later = RankFailure(2, "KeyError", "'weights'", time=3.0)
    assert first_cause([noticed, later, cause]) is cause
    also = RankFailure(3, "PeerLostError", "rank 1 is gone", peer_lost=True, time=0.5)
    assert first_cause([noticed, also]) is also
