"""What goes on after an error, and how a stranger's text is shown."""

from __future__ import annotations

import logging

import pytest

from hetexp.core.errors import logged, plain_line


def test_an_error_that_does_not_end_anything_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    done = []
    with logged("the model is counted with values"):
        done.append(1)
        raise KeyError("a\x1b[2J")
    with logged("the exchange counts as free", logging.WARNING):
        raise OSError("no driver\nmore")
    assert done == [1]
    assert [record.levelname for record in caplog.records] == ["DEBUG", "WARNING"]
    assert caplog.messages[0] == "the model is counted with values (KeyError: 'a\\x1b[2J')"
    assert caplog.messages[1] == "the exchange counts as free (OSError: no driver)"


def test_ctrl_c_is_not_held_back() -> None:
    with pytest.raises(KeyboardInterrupt), logged("nothing"):
        raise KeyboardInterrupt


def test_a_strangers_text_is_one_short_line() -> None:
    assert plain_line("\x1b]0;title\x07name\nmore") == "?]0;title?name"
    assert plain_line("") == ""
    assert len(plain_line("x" * 10_000)) == 121
