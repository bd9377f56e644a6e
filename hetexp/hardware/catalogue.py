"""The figures of cards that need not be in this machine. Unknown cards are refused, never guessed.

The figures are data: `catalogue.yaml` beside this file, and the user's own file of the same form that
`hardware.catalogue` names. Two figures are assumptions of hetexp and are defined here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hetexp.core.config import Vendor, validated
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, did_you_mean, must_be
from hetexp.core.section import Section

CATALOGUE = Path(__file__).with_name("catalogue.yaml")

EFFICIENCY = 0.45
"""Assumed fraction of the peak rate that training reaches, for every card without a figure of its own."""
OVERHEAD_SECONDS = 1.0e-5
"""Assumed fixed cost of one forward or one backward pass, for the same cards."""

PRECISIONS = ("float64", "float32", "tf32", "bfloat16", "float16")
CHECK_TOLERANCE = 0.01
"""Largest relative difference between a stated float32 rate and lanes × operations × clock."""

Fraction = Annotated[float, Field(gt=0, le=1)]
Entry = TypeVar("Entry", bound=Section)
_KEY = "hardware.catalogue"
_NAME = re.compile(r"[a-z0-9_]+")
_FIGURES = ("memory_gib", "tflops", "bandwidth_gb_per_second", "power_limit_watts", "link", "check")
"""Keys of a card that are facts and therefore have a source."""


class Link(Section):
    """A connection between a device and its host's memory, or between hosts."""

    gb_per_second: PositiveFloat
    """Theoretical rate of one direction, in 10^9 bytes a second."""
    efficiency: Fraction
    """Assumed fraction of it that a large copy reaches."""
    latency_seconds: NonNegativeFloat
    """Assumed time to start a copy."""
    source: str = ""

    def seconds(self, num_bytes: float) -> float:
        """Return the modelled time to move so many bytes in one direction."""
        return self.latency_seconds + num_bytes / (self.gb_per_second * 1e9 * self.efficiency)


class Check(Section):
    """The factors of a card's float32 rate."""

    lanes: PositiveInt
    clock_mhz: PositiveFloat
    flops_per_lane: PositiveInt = 2
    """Operations a lane and clock: 2 for one fused multiply-add."""

    @property
    def tflops(self) -> float:
        """Rate in 10^12 floating-point operations a second."""
        return self.lanes * self.flops_per_lane * self.clock_mhz * 1e-6


class CardEntry(Section):
    """A card's entry in a catalogue file."""

    name: str
    vendor: Vendor
    memory_gib: PositiveFloat
    tflops: dict[str, PositiveFloat]
    """Native precision → dense peak rate, in 10^12 floating-point operations a second."""
    bandwidth_gb_per_second: PositiveFloat
    power_limit_watts: PositiveFloat | None = None
    """`None` if the maker states none."""
    link: str
    """Key of the link to the host's memory."""
    unified_memory: bool = False
    """Whether device and host share one memory."""
    efficiency: Fraction = EFFICIENCY
    """Assumed fraction of the peak that training reaches."""
    overhead_seconds: PositiveFloat = OVERHEAD_SECONDS
    """Assumed fixed cost of one forward or one backward pass."""
    match: str | None = None
    """Words by which a real card of this kind is recognised (see `named`)."""
    aliases: list[str] = []
    """Other names for the same card."""
    check: Check | None = None
    sources: dict[str, str] = {}
    """Figure (`memory_gib`, `tflops`, `tflops.float64`, …) → document that states it."""


class Card(CardEntry):
    """A card of the catalogue with its link, as the plan carries it to the ranks."""

    key: str
    """Its name in the catalogue."""
    host_link: Link
    """The link that `link` names."""

    def compute_seconds(self, flops: float, precision: str) -> float:
        """Return the modelled time of one pass of so many floating-point operations."""
        return self.overhead_seconds + flops / (self.tflops[precision] * 1e12 * self.efficiency)

    def source(self, figure: str) -> str | None:
        """Return the source of `memory_gib`, `tflops.float16`, …; `None` if none is stated."""
        return self.sources.get(figure) or self.sources.get(figure.partition(".")[0])

    def figures(self) -> list[str]:
        """Return the names of this card's figures that are facts, not assumptions."""
        given = [name for name in _FIGURES if getattr(self, name) is not None and name != "tflops"]
        return [*given, *(f"tflops.{precision}" for precision in self.tflops)]


@dataclass(frozen=True)
class Catalogue:
    """All known cards and links by name."""

    cards: Mapping[str, Card]
    links: Mapping[str, Link]

    def card(self, name: str, subject: str = "the card to emulate") -> Card:
        """Return one card by its name or an alias.

        Args:
            name: as the user writes it.
            subject: subject of the message's sentence "… must be one of …".

        Raises:
            ConfigError: no such card; the message lists the known ones.
        """
        if name in self.cards:
            return self.cards[name]
        aliases = {alias: card for card in self.cards.values() for alias in card.aliases}
        if name in aliases:
            return aliases[name]
        raise ConfigError(
            f"{subject} must be one of {', '.join(sorted(self.cards))}, but is '{name}' instead."
            f"{did_you_mean(name, [*self.cards, *aliases])} A card of your own is an entry under `cards:` in "
            "a YAML file that `hardware.catalogue` names, with the keys of hetexp/hardware/catalogue.yaml."
        )

    def real(self, device: DeviceSpec) -> Card | None:
        """Return the catalogue's card of a real device, by vendor and name; `None` if it has none."""
        for card in self.cards.values():
            if card.vendor == device.vendor and named(card.match or card.name, device.name):
                return card
        return None


@cache
def shipped() -> Catalogue:
    """Return the cards and links that ship with hetexp."""
    return _resolve(_shipped_raw())


def card(name: str) -> Card:
    """Return one shipped card.

    Raises:
        ConfigError: no such card; the message lists the known ones.
    """
    return shipped().card(name)


def load_catalogue(path: str | None) -> Catalogue:
    """Return the shipped cards and links, replaced and extended by those of the user's file.

    Args:
        path: `hardware.catalogue`, relative to the working directory; `None`: only the shipped ones.

    Raises:
        ConfigError: all mistakes in the file, by key.
    """
    if path is None:
        return shipped()
    try:
        return _resolve(_merged(_shipped_raw(), _read(path), path))
    except ConfigError as error:
        raise ConfigError([_in_file(path, problem) for problem in error.problems]) from None


def card_of(spec: DeviceSpec) -> Card:
    """Return the card that an emulated device is paced to, from the facts in its spec."""
    if spec.card_facts is not None:
        return Card.model_validate(spec.card_facts)
    assert spec.card is not None
    return card(spec.card)


def named(match: str, name: str) -> bool:
    """Return whether a real card's name means the card that `match` names.

    The name must contain the words of `match` in sequence, and no word of another model (Ti, SUPER, XT, …)
    may follow: `RTX 3080` is not the RTX 3080 Ti, `L4` is not the L40.
    """
    sought, words = (re.findall(r"[a-z0-9]+", text.lower()) for text in (match, name))
    for start in range(len(words) - len(sought) + 1):
        end = start + len(sought)
        if sought and words[start:end] == sought:
            return not (words[end:] and words[end] in _VARIANTS)
    return False


_VARIANTS = {"ti", "super", "xt", "xtx", "gre", "d", "pro", "max", "ultra", "laptop", "mobile"}


def _shipped_raw() -> dict[str, Any]:
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(OmegaConf.load(CATALOGUE))
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def _read(path: str) -> dict[str, Any]:
    """Return the content of the user's file.

    Raises:
        ConfigError: all reasons why it does not consist of cards and links.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not Path(path).is_file():
        raise ConfigError(
            f"{must_be(_KEY, 'the path of a YAML file', path)} Looked for {Path(path).absolute()}."
        )
    try:
        raw: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        json.dumps(raw)  # plain types only, as in a configuration
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"`{_KEY}` must be a YAML file, but {path} cannot be read: {reason}.") from None
    if not isinstance(raw, dict) or not raw:
        raise ConfigError(f"`{_KEY}` must be a file with `cards:` or `links:`, but {path} has neither.")
    problems = []
    for key, value in raw.items():
        if key not in ("cards", "links"):
            hint = did_you_mean(str(key), ["cards", "links"])
            problems.append(f"`{key}` must be `cards` or `links`, the only keys of the file.{hint}")
        elif not isinstance(value, dict):
            problems.append(must_be(str(key), "a mapping of names to entries", value))
        else:
            wrong = {name: entry for name, entry in value.items() if not isinstance(entry, dict)}
            problems += [must_be(f"{key}.{name}", "a mapping", entry) for name, entry in wrong.items()]
    if problems:
        raise ConfigError(problems)
    return {key: {str(name): entry for name, entry in raw[key].items()} for key in raw}


def _merged(base: Mapping[str, Any], added: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Merge the user's entries into the shipped ones, key by key; the file is the source of its figures."""
    merged = {kind: dict(base[kind]) for kind in ("cards", "links")}
    for name, entry in added.get("links", {}).items():
        source = {"source": path} if "gb_per_second" in entry else {}
        merged["links"][name] = {**merged["links"].get(name, {}), **source, **entry}
    for name, entry in added.get("cards", {}).items():
        old = merged["cards"].get(name, {})
        new = {**old, **entry}
        stated = {key: path for key in entry if key in _FIGURES and key != "tflops"}
        if isinstance(entry.get("tflops"), dict):
            new["tflops"] = {**old.get("tflops", {}), **entry["tflops"]}
            stated |= {f"tflops.{precision}": path for precision in entry["tflops"]}
            if "check" not in entry and "float32" in entry["tflops"]:
                new.pop("check", None)  # it explains a figure that was replaced
        if isinstance(entry.get("sources", {}), dict):
            written = entry.get("sources", {})
            for figure in [figure for figure in stated if figure.partition(".")[0] in written]:
                del stated[figure]
            new["sources"] = {**old.get("sources", {}), **stated, **written}
        merged["cards"][name] = new
    return merged


def _resolve(raw: Mapping[str, Any]) -> Catalogue:
    """Check every entry, and give each card its link.

    Raises:
        ConfigError: all mistakes, by key in the file.
    """
    problems: list[str] = []
    known_links = _entries(raw["links"], "links", Link, problems)
    entries = _entries(raw["cards"], "cards", CardEntry, problems)
    for name, entry in entries.items():
        problems += _wrong_with(f"cards.{name}", entry, raw["links"])
    problems += _wrong_names(entries)
    if problems:
        raise ConfigError(problems)
    cards = {
        name: Card(**entry.model_dump(), key=name, host_link=known_links[entry.link])
        for name, entry in entries.items()
    }
    return Catalogue(cards, known_links)


def _entries(raw: Mapping[str, Any], kind: str, schema: type[Entry], problems: list[str]) -> dict[str, Entry]:
    """Return the entries that fit their schema, and append the problems of the others to `problems`."""
    entries = {}
    for name, value in raw.items():
        entry, wrong = validated(schema, value, f"{kind}.{name}")
        problems += wrong
        if entry is not None:
            entries[name] = entry
    return entries


def _wrong_with(key: str, entry: CardEntry, known_links: Iterable[str]) -> list[str]:
    """Return the problems of a card's values that have the right type."""
    problems = []
    if "float32" not in entry.tflops:
        problems.append(f"`{key}.tflops.float32` must be given, but is missing.")
    for precision in entry.tflops:
        if precision not in PRECISIONS:
            hint = did_you_mean(precision, PRECISIONS)
            problems.append(f"`{key}.tflops.{precision}` must be one of {', '.join(PRECISIONS)}.{hint}")
    if entry.link not in known_links:
        problems.append(must_be(f"{key}.link", f"one of {', '.join(known_links)}", entry.link))
    if entry.check is not None and "float32" in entry.tflops:
        stated, peak = entry.tflops["float32"], entry.check.tflops
        if abs(peak - stated) > CHECK_TOLERANCE * stated:
            problems.append(
                f"`{key}.check` must give the stated float32 rate of {stated:g} within "
                f"{CHECK_TOLERANCE:.0%}, but lanes × flops_per_lane × clock is {peak:.4g} instead."
            )
    return problems


def _wrong_names(entries: Mapping[str, CardEntry]) -> list[str]:
    """Return the problems of names that cannot name a device, or that two cards have."""
    problems = []
    owners = {name: name for name in entries}
    for name, entry in entries.items():
        for word in (name, *entry.aliases):
            if not _NAME.fullmatch(word):
                problems.append(
                    f"`cards.{name}` must be named with small letters, digits and underscores, but is called "
                    f"'{word}' instead."
                )
        for alias in entry.aliases:
            if owners.setdefault(alias, name) != name:
                problems.append(
                    f"`cards.{name}.aliases` must be free names, but '{alias}' is {owners[alias]} already."
                )
    return problems


def _in_file(path: str, problem: str) -> str:
    """Name the file in a problem: "`hardware.catalogue: cards.mine.link` (my.yaml) must be …"."""
    if problem.startswith(f"`{_KEY}`"):
        return problem
    key, _, sentence = problem.removeprefix("`").partition("`")
    return f"`{_KEY}: {key}` ({path}){sentence}"
