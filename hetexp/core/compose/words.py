"""What the user typed, before Hydra reads it: short forms, and words that the shell or a web page changed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence

_CARDS = re.compile(r"(?:hardware\.)?(?P<key>gpu_ids|cuda_ids)=(?P<value>.*)", re.DOTALL)
_MODE = re.compile(r"(?P<key>strategy(?:\.mode)?)=(?P<value>[\w,]*)")
_MODES = {"none": "single", "dataparallel": "dp", "distributed": "ddp", "hybrid": "hybrid", "auto": "auto"}
"""Modes of older configurations, and our strategies."""
_ADDED = re.compile(r"\+{1,2}(?P<rest>experiment=.*)", re.DOTALL)
_OWN_KEYS = ("model.weights=", "model.weights_strict=")
"""Keys that hetexp reads in a group beside the arguments of its class."""
_TYPOGRAPHIC = "“”„‘’‚«»"
_KEY = re.compile(r"[\w@$-]+(?:[./][\w@$-]+)*")
_SWEEPING = ("choice(", "range(", "interval(", "glob(", "shuffle(", "sort(")


def written_out(words: Sequence[str]) -> list[str]:
    """Return the words with `gpu_ids=0,1` as `hardware.gpu_ids=[0,1]`, and older modes as our strategies.

    `strategy=distributed` and `strategy.mode=distributed` are `strategy=ddp`. `+experiment=mine`, as other
    projects write it, is `experiment=mine`, since the group is among the defaults. `model.weights=…` gets
    the sign of a new key.

    With `-m` a comma sweeps, as for every key: `gpu_ids=0,1` is two jobs of one card each, and
    `'gpu_ids=choice([0,1],[2])'` two jobs of a list each.
    """
    sweep = any(word in ("-m", "--multirun") for word in words)
    return [_written_out(word, sweep) for word in words]


def _written_out(word: str, sweep: bool) -> str:
    mode = _MODE.fullmatch(word)
    if mode is not None:
        names = mode["value"].split(",")
        if mode["key"] == "strategy" or all(name in _MODES for name in names):
            return f"strategy={','.join(_MODES.get(name, name) for name in names)}"
    if word.startswith(_OWN_KEYS):  # no option of the group has it, and Hydra would ask for a sign
        return f"++{word}"
    added = _ADDED.fullmatch(word)
    if added is not None:
        return added["rest"]
    match = _CARDS.fullmatch(word)
    if match is None:
        return word
    value = match["value"]
    bare = "," in value and not value.startswith(("[", "'", '"', *_SWEEPING))
    return f"hardware.{match['key']}=" + (f"[{value}]" if bare and not sweep else value)


def without_hyphens(words: Sequence[str], flags: Iterable[str]) -> list[str]:
    """Return the words with `--key=value` as `key=value`, as the agent of a W&B sweep writes it.

    Args:
        flags: those of the command, which stay, shortened as well (`--multi`).
    """
    flags = list(flags)
    return [_without_hyphens(word, flags) for word in words]


def _without_hyphens(word: str, flags: Sequence[str]) -> str:
    flag, equals, _ = word.partition("=")
    key = flag[2:]
    is_key = flag.startswith("--") and _KEY.fullmatch(key) is not None and "-" not in key
    if not is_key or any(known.startswith(flag) for known in flags):
        return word
    # Without a value it is refused as a key, which says more than "unrecognized argument".
    return word[2:] if equals or "." in key else word


def asks_for_help(arguments: argparse.Namespace) -> bool:
    """Return whether the command only shows help or a configuration."""
    asks = (arguments.help, arguments.hydra_help, arguments.info, arguments.cfg, arguments.shell_completion)
    return any(asks)


def end_of_word(words: Sequence[str]) -> int:
    """Return how many of the words the shell made of the first one: open brackets, or spaces around `=`."""
    if len(words) > 2 and words[1] == "=":
        return 3
    if len(words) > 1 and (
        (words[0].endswith("=") and "=" not in words[1]) or (words[1].startswith("=") and "=" not in words[0])
    ):
        return 2
    if len(words) > 1 and words[0].endswith(",") and "=" not in words[1]:
        return 1 + end_of_word(words[1:])
    depth = 0
    for count, word in enumerate(words, start=1):
        depth += sum(word.count(bracket) for bracket in "[{") - sum(word.count(bracket) for bracket in "]}")
        if depth == 0:
            return count
    return 1


def without_spaces(whole: str) -> str:
    """Return what to type instead, for the shell to keep it one word."""
    key, _, value = whole.partition("=")
    key, value = key.strip(), value.strip()
    value = value if "{" in value else re.sub(r" *, *", ",", value)
    return f'"{key}={value}"' if " " in value else f"{key}={value}"


def why_unreadable(text: str) -> str:
    """Say what keeps Hydra from reading a word, and how it is written."""
    key, equals, value = text.partition("=")
    if any(sign in text for sign in _TYPOGRAPHIC):
        return "“ and ” are typographic quotes, as web pages have them: type ' or \"."
    if not equals:
        return "It has no `=`; a value with spaces needs quotes around the whole word."
    if not key:
        return "There is no key before `=`."
    if not _KEY.fullmatch(key.lstrip("+~")):
        return "The parts of a key are joined by one dot each, as in `trainer.max_steps`."
    if any(text.count(one) != text.count(other) for one, other in ("[]", "{}")):
        return "Its brackets do not match."
    if "=" in value:
        return f"A value with `=` in it needs quotes that reach Hydra: '{key}=\"{value}\"'."
    return (
        f"A list is written [a,b]; a text with such signs needs quotes that reach Hydra: '{key}=\"{value}\"'."
    )
