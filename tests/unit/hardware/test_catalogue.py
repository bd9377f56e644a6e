"""The catalogue: sourced figures that add up, a person's own file, no guess about any other card."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from hetexp.core.config import Vendor
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.hardware import catalogue as module
from hetexp.hardware.catalogue import (
    CATALOGUE,
    EFFICIENCY,
    OVERHEAD_SECONDS,
    PRECISIONS,
    Card,
    card,
    card_of,
    load_catalogue,
    named,
    shipped,
)

ROOT = Path(__file__).parents[3]
CARDS = shipped().cards
NAMES = sorted(CARDS)
ASKED_FOR = {
    "nvidia": "rtx_3090 rtx_4090 rtx_2080_ti rtx_3080 rtx_5090 a100 v100 t4 l4 h100 h200 rtx_a6000",
    "intel": "arc_a770 arc_a750 arc_a380 arc_b580",
    "amd": "rx_7900_xtx rx_7800_xt rx_6600 mi250 mi300x",
    "apple": "m2_max m4_max",
    "cpu": "desktop_cpu_16",
}
ALIASES = {
    "a6000": "rtx_a6000",
    "a380": "arc_a380",
    "a750": "arc_a750",
    "a770": "arc_a770",
    "b580": "arc_b580",
    "6600": "rx_6600",
    "7800_xt": "rx_7800_xt",
    "7900_xtx": "rx_7900_xtx",
    "4090": "rtx_4090",
}
REAL_NAMES = {  # as NVML, the Intel and AMD drivers, Metal and /proc/cpuinfo say them
    "a100": "NVIDIA A100-SXM4-80GB",
    "arc_a380": "Intel(R) Arc(TM) A380 Graphics",
    "arc_a750": "Intel(R) Arc(TM) A750 Graphics",
    "arc_a770": "Intel(R) Arc(TM) A770 Graphics",
    "arc_b580": "Intel(R) Arc(TM) B580 Graphics",
    "desktop_cpu_16": "AMD Ryzen 9 7950X 16-Core Processor",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "l4": "NVIDIA L4",
    "m2_max": "Apple M2 Max",
    "m4_max": "Apple M4 Max",
    "mi250": "AMD Instinct MI250X/MI250",
    "mi300x": "AMD Instinct MI300X",
    "rtx_2080_ti": "NVIDIA GeForce RTX 2080 Ti",
    "rtx_3080": "NVIDIA GeForce RTX 3080",
    "rtx_3090": "NVIDIA GeForce RTX 3090",
    "rtx_4090": "NVIDIA GeForce RTX 4090",
    "rtx_5090": "NVIDIA GeForce RTX 5090",
    "rtx_a6000": "NVIDIA RTX A6000",
    "rx_6600": "AMD Radeon RX 6600",
    "rx_7800_xt": "AMD Radeon RX 7800 XT",
    "rx_7900_xtx": "AMD Radeon RX 7900 XTX",
    "t4": "Tesla T4",
    "v100": "Tesla V100-SXM2-32GB",
}
OTHERS = (
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 3080 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3080 Laptop GPU",
    "NVIDIA L40S",
    "NVIDIA T400",
    "NVIDIA RTX 6000 Ada Generation",
    "AMD Radeon RX 6600 XT",
    "AMD Radeon RX 7900 XT",
    "Apple M2",
    "Apple M2 Pro",
    "AMD Ryzen 9 7950X3D 16-Core Processor",
)


# ---------------------------------------------------------------- the shipped cards


@pytest.mark.parametrize("vendor", get_args(Vendor))
def test_the_cards_of_each_vendor(vendor: str) -> None:
    assert {key for key, one in CARDS.items() if one.vendor == vendor} == set(ASKED_FOR[vendor].split())


@pytest.mark.parametrize("name", NAMES)
def test_every_card_is_complete(name: str) -> None:
    known = card(name)
    assert known.key == name
    assert known.name.strip()
    assert "float32" in known.tflops  # what a run computes in by default
    assert set(known.tflops) <= set(PRECISIONS)
    assert 0 < known.efficiency <= 1
    assert 0 < known.overhead_seconds < 1
    assert known.host_link == shipped().links[known.link]
    assert known.unified_memory == (known.vendor in ("apple", "cpu"))
    assert (known.power_limit_watts is None) == (known.vendor == "apple")
    assert known.match is not None


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    known = card(name)
    for figure in known.figures():
        source = known.source(figure)
        assert source is not None, figure
        assert len(source.split()) >= 4, source
        assert "http" not in source
    assert known.sources.keys() <= {*known.figures(), "tflops"}  # no source of a figure that is not there


@pytest.mark.parametrize("name", NAMES)
def test_the_stated_peak_is_lanes_times_clock(name: str) -> None:
    known = card(name)
    assert known.check is not None
    by_hand = known.check.lanes * known.check.flops_per_lane * known.check.clock_mhz * 1e6 / 1e12
    assert known.check.tflops == pytest.approx(by_hand)
    assert known.tflops["float32"] == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_lower_precision_is_not_slower(name: str) -> None:
    rates = card(name).tflops
    for slower, faster in (("float64", "float32"), ("float32", "tf32"), ("tf32", "bfloat16")):
        assert rates.get(slower, 0.0) <= rates.get(faster, 1e9) * 1.001
    assert rates.get("bfloat16", rates.get("float16")) == rates.get("float16")


def test_what_is_not_native_is_not_there() -> None:
    for name in ("rtx_2080_ti", "t4", "v100", "rx_6600"):  # Turing, Volta, RDNA 2
        assert "bfloat16" not in card(name).tflops
    for name in ("arc_a770", "arc_a750", "arc_a380", "m2_max", "m4_max"):
        assert "float64" not in card(name).tflops
    tf32 = {name for name, one in CARDS.items() if "tf32" in one.tflops}
    ampere_on = {"rtx_3080", "rtx_3090", "rtx_4090", "rtx_5090", "rtx_a6000", "a100", "h100", "h200", "l4"}
    assert tf32 == {*ampere_on, "mi300x"}


def test_the_assumptions_are_stated_once() -> None:
    assert "efficiency" not in yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))["cards"]["rtx_3090"]
    assert {(one.efficiency, one.overhead_seconds) for one in CARDS.values()} == {
        (EFFICIENCY, OVERHEAD_SECONDS)
    }


@pytest.mark.parametrize("name", NAMES)
def test_names_can_be_typed_as_a_device(name: str) -> None:
    assert name.isidentifier()
    assert name == name.lower()


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases(alias: str, name: str) -> None:
    assert card(alias) is card(name)


def test_modelled_seconds_by_hand() -> None:
    known = card("rtx_3090")
    flops = 35.58e12 * 0.45  # what the card does in a second
    assert known.compute_seconds(flops, "float32") == pytest.approx(1.0 + known.overhead_seconds)
    assert known.compute_seconds(0, "float32") == known.overhead_seconds
    assert known.compute_seconds(1e12, "float64") > known.compute_seconds(1e12, "float32")


@pytest.mark.parametrize("wrong", ["rtx_3091", "a381"])
def test_an_unknown_card_is_refused_with_the_known_names(wrong: str) -> None:
    with pytest.raises(ConfigError) as refused:
        card(wrong)
    (problem,) = refused.value.problems
    for name in NAMES:
        assert name in problem
    assert f"'{wrong}'" in problem
    assert "Did you mean `rtx_3090`?" in problem or "Did you mean `a380`?" in problem
    assert "`hardware.catalogue`" in problem
    assert "`cards:`" in problem


# ---------------------------------------------------------------- links


def test_link_seconds_by_hand() -> None:
    link = shipped().links["pcie4x16"]
    assert link.seconds(0) == link.latency_seconds
    megabytes_64 = 64 * 1024**2
    expected = 1e-5 + megabytes_64 / (31.508e9 * 0.8)
    assert link.seconds(megabytes_64) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "gigatransfers", "lanes"),
    [("pcie3x16", 8, 16), ("pcie4x8", 16, 8), ("pcie4x16", 16, 16), ("pcie5x16", 32, 16)],
)
def test_pcie_rates_follow_from_the_specification(name: str, gigatransfers: float, lanes: int) -> None:
    assert shipped().links[name].gb_per_second == pytest.approx(
        gigatransfers * lanes * 128 / 130 / 8, rel=1e-4
    )


@pytest.mark.parametrize("gigabits", [1, 10, 25, 100])
def test_ethernet_rates(gigabits: int) -> None:
    assert shipped().links[f"ethernet_{gigabits}g"].gb_per_second == gigabits / 8


@pytest.mark.parametrize("name", sorted(shipped().links))
def test_every_link_is_complete(name: str) -> None:
    link = shipped().links[name]
    assert 0 < link.efficiency <= 1
    assert 0 < link.latency_seconds < 1e-3
    assert len(link.source.split()) >= 4


@pytest.mark.parametrize("name", [name for name in NAMES if CARDS[name].unified_memory])
def test_a_copy_in_unified_memory_reads_and_writes_it(name: str) -> None:
    assert card(name).host_link.gb_per_second == card(name).bandwidth_gb_per_second / 2


# ---------------------------------------------------------------- real cards by their names


@pytest.mark.parametrize("name", NAMES)
def test_a_real_card_is_told_by_its_name(name: str) -> None:
    match = CARDS[name].match
    assert match is not None
    assert [key for key, real in REAL_NAMES.items() if named(match, real)] == [name]
    assert [other for other in OTHERS if named(match, other)] == []


@pytest.mark.parametrize(
    ("match", "name", "means"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("a100", "NVIDIA A100-PCIE-40GB", True),
        ("A100 SXM4", "NVIDIA A100-SXM4-80GB", True),
        ("A100 PCIE", "NVIDIA A100-SXM4-80GB", False),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("RTX 3080", "NVIDIA GeForce RTX 3080 Ti", False),
        ("RTX 3080 Ti", "NVIDIA GeForce RTX 3080 Ti", True),
        ("3080", "NVIDIA GeForce RTX 3080", True),
        ("", "NVIDIA GeForce RTX 3080", False),
    ],
)
def test_which_names_match(match: str, name: str, means: bool) -> None:
    assert named(match, name) is means


# ---------------------------------------------------------------- a person's own file

MINE: dict[str, Any] = {
    "name": "RTX 3060",
    "vendor": "nvidia",
    "memory_gib": 12,
    "tflops": {"float32": 12.74, "float16": 25.3},
    "bandwidth_gb_per_second": 360,
    "power_limit_watts": 170,
    "link": "pcie4x16",
    "check": {"lanes": 3584, "clock_mhz": 1777},
    "sources": {"memory_gib": "NVIDIA product page, GeForce RTX 3060"},
}


def written(folder: Path, content: Any) -> str:
    path = folder / "my_cards.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def refused(path: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_catalogue(path)
    return error.value.problems


def test_without_a_file_it_is_the_shipped_one() -> None:
    assert load_catalogue(None).cards == CARDS


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    path = written(tmp_path, {"cards": {"rtx_3060": MINE}})
    known = load_catalogue(path)
    assert set(known.cards) == {*NAMES, "rtx_3060"}
    mine = known.card("rtx_3060")
    assert mine.compute_seconds(12.74e12, "float32") == pytest.approx(OVERHEAD_SECONDS + 1 / EFFICIENCY)
    assert mine.host_link == shipped().links["pcie4x16"]
    assert mine.source("memory_gib") == "NVIDIA product page, GeForce RTX 3060"
    assert mine.source("tflops.float16") == path  # whoever states a figure is its source
    assert "rtx_3060" not in shipped().cards


def test_the_path_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, {"cards": {"rtx_3060": MINE}})
    monkeypatch.chdir(tmp_path)
    assert "rtx_3060" in load_catalogue("my_cards.yaml").cards


def test_a_file_may_change_a_shipped_card_in_part(tmp_path: Path) -> None:
    own = {"cards": {"rtx_3090": {"efficiency": 0.6, "tflops": {"float32": 40.0}}}}
    path = written(tmp_path, own)
    changed = load_catalogue(path).card("rtx_3090")
    shipped = card("rtx_3090")
    assert changed.efficiency == 0.6
    assert changed.tflops == {**shipped.tflops, "float32": 40.0}
    assert changed.check is None  # it explained the rate that was replaced
    assert changed.source("tflops.float32") == path
    assert changed.source("tflops.float16") == shipped.source("tflops.float16")
    assert changed.memory_gib == shipped.memory_gib


def test_a_link_of_ones_own(tmp_path: Path) -> None:
    riser = {"gb_per_second": 0.985, "efficiency": 0.7, "latency_seconds": 2e-5}
    content = {"links": {"riser": riser}, "cards": {"rtx_3090": {"link": "riser"}}}
    known = load_catalogue(written(tmp_path, content))
    assert known.card("rtx_3090").host_link.gb_per_second == 0.985
    assert known.card("rtx_4090").host_link == shipped().links["pcie4x16"]


def test_a_changed_shipped_link_reaches_the_cards_on_it(tmp_path: Path) -> None:
    known = load_catalogue(written(tmp_path, {"links": {"pcie4x16": {"efficiency": 0.5}}}))
    assert known.card("rtx_3090").host_link.efficiency == 0.5


BAD = {
    **MINE,
    "memory_gib": "12",
    "vendor": "nvdia",
    "linc": "pcie4x16",
    "tflops": {"float32": -1},
    "check": {"lanes": 3584.5, "clock_mhz": 1777},
}


def test_every_mistake_is_told_at_once_by_its_key(tmp_path: Path) -> None:
    unknown = {
        **MINE,
        "link": "pcie4x17",
        "tflops": {"float32": 12.74, "fp16": 1.0},
        "aliases": ["a380", "Big One"],
    }
    wrong_peak = {**MINE, "check": {"lanes": 3584, "clock_mhz": 1320}}
    content = {
        "cards": {"bad": BAD, "unknown": unknown, "wrong_peak": wrong_peak, "RTX": MINE},
        "links": {"slow": {"gb_per_second": 0}},
    }
    path = written(tmp_path, content)
    problems = refused(path)
    told = {problem.split("`")[1].removeprefix("hardware.catalogue: ") for problem in problems}
    assert all(problem.startswith("`hardware.catalogue: ") for problem in problems)
    assert all(f"({path})" in problem for problem in problems)
    assert told == {
        "cards.bad.memory_gib",
        "cards.bad.vendor",
        "cards.bad.linc",
        "cards.bad.tflops.float32",
        "cards.bad.check.lanes",
        "cards.unknown.link",
        "cards.unknown.tflops.fp16",
        "cards.unknown",
        "cards.unknown.aliases",
        "cards.wrong_peak.check",
        "cards.RTX",
        "links.slow.gb_per_second",
        "links.slow.efficiency",
        "links.slow.latency_seconds",
    }
    text = "\n".join(problems)
    for part in ("Did you mean `link`?", "pcie4x16", "bfloat16", "'a380' is arc_a380 already", "9.462"):
        assert part in text


def test_a_card_needs_float32(tmp_path: Path) -> None:
    mine = {key: value for key, value in MINE.items() if key != "check"}
    path = written(tmp_path, {"cards": {"mine": {**mine, "tflops": {"float16": 1.0}}}})
    assert refused(path) == [
        f"`hardware.catalogue: cards.mine.tflops.float32` ({path}) must be given, but is missing."
    ]


def test_a_missing_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (problem,) = refused("my_crads.yaml")
    assert problem.startswith("`hardware.catalogue` must be the path of a YAML file, but is 'my_crads.yaml'")
    assert str(tmp_path / "my_crads.yaml") in problem


@pytest.mark.parametrize(
    "content",
    ["", "just a word", "- a\n- list\n", "cards: {a: [}", "cards:\n  - {name: x}\n", "cards: {a: 5}"],
)
def test_a_file_of_another_form_is_told(tmp_path: Path, content: str) -> None:
    (problem,) = refused(written(tmp_path, content))
    assert problem.startswith("`hardware.catalogue")
    assert " must be " in problem


def test_other_keys_of_the_file_are_told(tmp_path: Path) -> None:
    (problem,) = refused(written(tmp_path, {"card": {"rtx_3060": MINE}}))
    assert problem.startswith("`hardware.catalogue: card` ")
    assert "Did you mean `cards`?" in problem


# ---------------------------------------------------------------- what travels to a rank


def test_a_device_carries_its_card(tmp_path: Path) -> None:
    mine = load_catalogue(written(tmp_path, {"cards": {"rtx_3060": MINE}})).card("rtx_3060")
    spec = DeviceSpec("emulated:0", "emulated", 0, "mine", "nvidia", card="rtx_3060")
    facts = mine.model_dump(mode="json")
    carried = DeviceSpec("emulated:0", "emulated", 0, "mine", "nvidia", card="rtx_3060", card_facts=facts)
    assert card_of(carried) == mine
    assert isinstance(card_of(carried), Card)
    assert hash(carried) == hash(spec)
    with pytest.raises(ConfigError):
        card_of(spec)  # without its facts the name alone means nothing


def test_the_shipped_file_is_read_once() -> None:
    assert module.shipped() is module.shipped()


# ---------------------------------------------------------------- the table in the guide


def test_the_table_of_cards_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_cards_table", ROOT / "scripts/make_cards_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.page()
    assert (ROOT / "docs/reference/cards.md").read_text(encoding="utf-8") == text, (
        "run: python scripts/make_cards_table.py"
    )
    for name in NAMES:
        assert f"`{name}`" in text


def test_the_guides_own_card_is_right(tmp_path: Path) -> None:
    guide = (ROOT / "docs/how-to/mixed-cards.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(# my_cards\.yaml\n.*?)```", guide, flags=re.DOTALL)
    known = load_catalogue(written(tmp_path, example))
    assert known.card("rtx_3060").host_link == known.links["riser"]
    assert known.card("rtx_3090").efficiency == 0.6
