"""Output streams that can show any text, whatever the locale says."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

_HANDLER = "hetexp"
_PLAIN = {
    "…": "...",
    "–": "-",
    "—": "-",
    "×": "x",
    "÷": "/",
    "·": ".",
    "→": "->",
    "▸": ">",
    "›": ">",
    "“": '"',
    "”": '"',
    "’": "'",
    "‘": "'",
    "≤": "<=",
    "≥": ">=",
    "█": "#",
    "░": ".",
    "━": "-",
    "─": "-",
    "│": "|",
    "┃": "|",
    "↑": "^",
    "↓": "v",
    **dict.fromkeys("▁▂▃", "."),
    **dict.fromkeys("▄▅", ":"),
    **dict.fromkeys("▆▇", "|"),
    "µ": "u",
    "ß": "ss",
}
"""Characters of our own texts, for a terminal that lacks them."""


def show_any_text() -> None:
    """Let this process print what its streams' encodings lack as plainer characters, instead of an error.

    Locales such as C and variables such as PYTHONIOENCODING decide these encodings. Names of files may have
    bytes that are no text in any of them.
    """
    codecs.register_error(_HANDLER, _plainer)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def write_utf8() -> None:
    """Let this process write UTF-8, as a rank's log is read; what has no UTF-8 is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _plainer(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte of a file's name that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    letters = unicodedata.normalize("NFKD", character).encode("ascii", errors="ignore").decode()
    return _PLAIN.get(character) or letters or "?"
