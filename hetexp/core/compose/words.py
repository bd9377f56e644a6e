"""What a person typed, before Hydra reads it: short forms that mean something else in Hydra's grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CARDS = re.compile(r"(?:hardware\.)?(?P<key>gpu_ids|cuda_ids)=(?P<value>.*)", re.DOTALL)
_MODE = re.compile(r"(?P<key>strategy(?:\.mode)?)=(?P<value>[\w,]*)")
_MODES = {"none": "single", "dataparallel": "dp", "distributed": "ddp", "hybrid": "hybrid", "auto": "auto"}
"""Modes of older configurations, and our strategies."""
_ADDED = re.compile(r"\+{1,2}(?P<rest>experiment=.*)", re.DOTALL)
_SWEEPING = ("choice(", "range(", "interval(", "glob(", "shuffle(", "sort(")


def written_out(words: Sequence[str]) -> list[str]:
    """Return the words with `gpu_ids=0,1` as `hardware.gpu_ids=[0,1]`, and older modes as our strategies.

    `strategy=distributed` and `strategy.mode=distributed` are `strategy=ddp`, `+experiment=mine`, as other
    projects write it, is `experiment=mine`: the group is among the defaults already.

    With `-m` a comma sweeps, as for every key: `gpu_ids=0,1` is two jobs of one card each, and
    `'gpu_ids=choice([0,1],[2])'` two jobs of a list each.
    """
    sweep = any(word in ("-m", "--multirun") for word in words)
    return [_written_out(word, sweep) for word in words]


def _written_out(word: str, sweep: bool) -> str:
    mode = _MODE.fullmatch(word)
    if mode is not None:
        wanted = mode["value"].split(",")
        if mode["key"] == "strategy" or all(one in _MODES for one in wanted):
            return f"strategy={','.join(_MODES.get(one, one) for one in wanted)}"
    added = _ADDED.fullmatch(word)
    if added is not None:
        return added["rest"]
    match = _CARDS.fullmatch(word)
    if match is None:
        return word
    value = match["value"]
    bare = "," in value and not value.startswith(("[", "'", '"', *_SWEEPING))
    return f"hardware.{match['key']}=" + (f"[{value}]" if bare and not sweep else value)
