"""Hypothesis strategies for speed curves, shared by the tests of core and balancing."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from hetexp.core.cost.speed import SpeedCurve

seconds = st.integers(0, 40).map(lambda n: n / 8)  # exact in binary: equal times are equal


@st.composite
def curves(draw: Any, most_cap: int | None = None, straight: bool = False) -> SpeedCurve:
    """Curves of any kind; `straight` ones have no kinks, `most_cap` bounds the caps that some have."""
    fixed, per_sample = draw(seconds), draw(seconds)
    if fixed + per_sample == 0:
        per_sample = 0.125
    kinks = draw(st.dictionaries(st.integers(1, 20), seconds, max_size=0 if straight else 2))
    return SpeedCurve(
        fixed,
        per_sample,
        tuple(sorted(kinks.items())),
        update_seconds=draw(seconds),
        microbatch_size=draw(st.none() | st.integers(1, 12)),
        cap=draw(st.none() | st.integers(0, 8 if most_cap is None else most_cap)),
    )
