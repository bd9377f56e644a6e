"""A part of a write in a thread of its own."""

from __future__ import annotations

import threading

import pytest

from hetexp.checkpoint.background import beside


def test_a_function_runs_while_the_body_does() -> None:
    met = threading.Barrier(2, timeout=10)
    with beside(lambda: met.wait() + 10) as function:
        met.wait()
    assert function.result() in (10, 11)


def test_its_error_is_raised_by_the_result_alone() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with beside(fail) as function:
        pass
    with pytest.raises(OSError, match="No space left"):
        function.result()


def test_it_has_ended_when_the_body_fails() -> None:
    ended, go_on = [], threading.Event()

    def slow() -> None:
        go_on.wait(10)
        ended.append(True)

    def fail() -> None:
        with beside(slow):
            go_on.set()
            raise ValueError("body")

    with pytest.raises(ValueError, match="body"):
        fail()
    assert ended == [True]
