"""What a terminal shows that cannot show everything."""

from __future__ import annotations

import io
import sys

import pytest

from hetexp.core.streams import show_any_text, write_utf8

TEXT = "größe – 3 × 2 … █░ ≥ 1 µs → 模 caf\udce9"


def written(monkeypatch: pytest.MonkeyPatch, encoding: str, prepare: object) -> bytes:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # such as a notebook's: it shows all
    prepare()  # type: ignore[operator]
    print(TEXT, flush=True)
    return raw.getvalue().strip()


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", "grosse - 3 x 2 ... #. >= 1 us -> ? caf\\xe9"),
        ("latin-1", "größe - 3 × 2 ... #. >= 1 µs -> ? caf\\xe9"),
        ("utf-8", "größe – 3 × 2 … █░ ≥ 1 µs → 模 caf\\xe9"),
    ],
)
def test_what_an_encoding_lacks_is_plainer(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str
) -> None:
    assert written(monkeypatch, encoding, show_any_text).decode(encoding) == shown


def test_a_ranks_log_is_utf8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, "ascii", write_utf8).decode() == TEXT.replace("\udce9", "\\udce9")
