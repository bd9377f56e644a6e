"""What is known of cards that are not in this machine. Unknown cards are refused, never guessed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import PositiveFloat, TypeAdapter

from hetexp.core.config import Section, Vendor
from hetexp.core.errors import ConfigError, did_you_mean

CATALOGUE = Path(__file__).with_name("catalogue.yaml")


class Card(Section):
    """One card of the catalogue; each figure from the source that the entry names."""

    name: str
    vendor: Vendor
    memory_gib: PositiveFloat
    tflops: dict[str, PositiveFloat]
    """Peak rate a precision, in 10^12 floating-point operations a second."""
    bandwidth_gb_per_second: PositiveFloat
    power_limit_watts: PositiveFloat
    efficiency: PositiveFloat
    """Assumed fraction of the peak that training reaches."""
    overhead_seconds: PositiveFloat
    """Assumed fixed cost of one forward or one backward pass."""
    source: str

    def compute_seconds(self, flops: float, precision: str) -> float:
        """Return the modelled time of one pass of so many floating-point operations."""
        return self.overhead_seconds + flops / (self.tflops[precision] * 1e12 * self.efficiency)


@cache
def catalogue() -> dict[str, Card]:
    """Return all cards by their catalogue name."""
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(OmegaConf.load(CATALOGUE))
    return TypeAdapter(dict[str, Card]).validate_python(raw)


def card(name: str) -> Card:
    """Return one card.

    Raises:
        ConfigError: no such card; the message lists the known ones.
    """
    known = catalogue()
    if name not in known:
        raise ConfigError(
            f"the card to emulate must be one of {', '.join(sorted(known))}, but is '{name}' instead."
            f"{did_you_mean(name, known)} A new card is an entry in hetexp/hardware/catalogue.yaml."
        )
    return known[name]
