"""Write docs/reference/cards.md from the catalogue of cards.

python scripts/make_cards_table.py
"""

from __future__ import annotations

from pathlib import Path

from benchlib.tables import table

from hetexp.hardware.catalogue import EFFICIENCY, OVERHEAD_SECONDS, PRECISIONS, Card, shipped

PAGE = Path(__file__).parents[1] / "docs/reference/cards.md"
VENDORS = {"nvidia": "NVIDIA", "intel": "Intel", "amd": "AMD", "apple": "Apple", "cpu": "CPU"}


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}" if value < 1000 else f"{value:.15g}"


def card_row(card: Card) -> list[str]:
    names = ", ".join(f"`{name}`" for name in [card.key, *card.aliases])
    rates = [number(card.tflops.get(precision)) for precision in PRECISIONS]
    figures = [card.memory_gib, card.bandwidth_gb_per_second, card.power_limit_watts]
    return [names, card.name, *rates, *map(number, figures), card.link]


def sources(card: Card) -> list[str]:
    """One line a document, with the figures that are from it."""
    by_document: dict[str, list[str]] = {}
    for figure in card.figures():
        by_document.setdefault(card.source(figure) or "", []).append(figure)
    lines = [f"  - {document}: {', '.join(figures)}" for document, figures in by_document.items()]
    return [f"- `{card.key}`", *lines]


def page() -> str:
    cards = sorted(shipped().cards.values(), key=lambda card: (list(VENDORS).index(card.vendor), card.key))
    head = ["name in hetexp", "card", *PRECISIONS, "GiB", "GB/s", "W", "link"]
    lines = [
        "# Cards",
        "",
        "Made by `scripts/make_cards_table.py` from `hetexp/hardware/catalogue.yaml`; change it there.",
        "",
        "Peak rates are dense, in 10¹² operations a second, on the matrix units where the card has them. "
        "–: not native, or the maker states none.",
        f"Emulation assumes that training reaches {EFFICIENCY:g} of the peak and that a pass has a fixed "
        f"cost of {OVERHEAD_SECONDS * 1e6:g} µs;",
        "neither is a measurement. Cards of your own: "
        "[mixed cards](../how-to/mixed-cards.md#cards-of-your-own).",
    ]
    for vendor, title in VENDORS.items():
        rows = [card_row(card) for card in cards if card.vendor == vendor]
        lines += ["", f"## {title}", "", table(head, rows)]
    link_head = ["name", "GB/s, one direction", "efficiency (assumed)", "latency, µs (assumed)", "source"]
    link_rows = [
        [
            f"`{name}`",
            number(link.gb_per_second),
            number(link.efficiency),
            number(link.latency_seconds * 1e6),
            link.source,
        ]
        for name, link in shipped().links.items()
    ]
    lines += ["", "## Links", "", table(link_head, link_rows), "", "## Sources", ""]
    lines += [line for card in cards for line in sources(card)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
