"""The exit codes of commands."""

from __future__ import annotations

import pytest

from hetexp.commands.ending import exit_code
from hetexp.core.errors import ConfigError


def test_what_is_refused_is_told_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise ConfigError("`--weights` must be two numbers, but is one instead.")

    assert exit_code(refuse) == exit_code(refuse, drives_torch=False) == 2
    assert capsys.readouterr().err.count("`--weights` must be two numbers") == 2


def test_a_command_says_itself_how_it_ended() -> None:
    assert [exit_code(lambda: code, drives_torch=False) for code in (0, 1)] == [0, 1]
