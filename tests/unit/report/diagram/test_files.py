"""Diagrams of plans: what is in the picture, and that both languages say so, whatever things are called."""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import plan_on, unbuilt_config

from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.stage import Stage
from hetexp.core.topology import Group, Topology
from hetexp.hardware.catalogue import shipped
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.report.diagram import files as diagram
from hetexp.report.diagram.dot import DARK, VENDOR_COLOURS, dot_of
from hetexp.report.diagram.files import FORMATS, NO_DOT, has_dot, svg_of, write_diagrams
from hetexp.report.diagram.mermaid import mermaid_of
from hetexp.report.diagram.picture import MOST_TITLE_LINES, Rate, picture_of

CARDS = ("rtx_3090", "rx_7900_xtx", "arc_a770", "t4")
EMULATED = [EmulatedBackend.describe_card(place, shipped().cards[name]) for place, name in enumerate(CARDS)]
REAL = [
    DeviceSpec("cuda:0", "cuda", 0, "NVIDIA GeForce RTX 3090", "nvidia", 24 * GIB),
    DeviceSpec(
        "xpu:0", "xpu", 0, "Arc A770", "intel", 16 * GIB, python="/opt/a/long/way/to/envs/xpu/bin/python"
    ),
    DeviceSpec("cpu:0", "cpu", 0, "Xeon", "cpu"),
]
ODD = '<b>"x"</b> & `y` #1; | ] } \\n --> end\n%% {{ü}} \x07'
needs_dot = pytest.mark.skipif(not has_dot(), reason="Graphviz is not installed")

# A strict reading of what is written: every line is one of these, or the test fails.
TEXT = r'"(?:[^"#<>&`\\]|#\d+;|<br/>)*"'
MERMAID = [
    re.compile(rf"  subgraph \w+\[{TEXT}\]|  end"),
    re.compile(rf"    \w+\[{TEXT}\]:::\w+"),
    re.compile(rf"  \w+\[{TEXT}\]:::\w+|  \w+\(\[{TEXT}\]\):::\w+"),
    re.compile(rf"  \w+ (?:---|==>)(?:\|{TEXT}\|)? \w+"),
    re.compile(r"  (?:classDef|style) \w+ (?:[a-z-]+:[#\w ]+,?)+"),
    re.compile(r"  class \w+(?:,\w+)* \w+"),
]


def made(devices: list[DeviceSpec], strategy: str = "ddp.DDP", **changes: Any) -> Plan:
    arguments = changes.pop("arguments", {})
    config = unbuilt_config(
        strategy={"_target_": f"hetexp.strategy.{strategy}", **arguments},
        trainer={"global_batch_size": 12 * len(devices)},
    )
    name = strategy.partition(".")[0]
    return plan_on(devices, config, strategy=name, collective_backend="gloo", **changes)


def pipelines(**changes: Any) -> Plan:
    """Two pipelines: the first and last device have one together."""
    stages = ((Stage(0, 1, 2, 6),), (Stage(1, 0, 0, 3),), (Stage(1, 1, 3, 6),), (Stage(0, 0, 0, 2),))
    return made(EMULATED, "hybrid.Hybrid", stages=stages, replica_batch_sizes=(30, 18), **changes)


def mermaid(plan: Plan) -> list[str]:
    """Return the lines of a plan's flowchart, each of them well-formed."""
    _, front, body = mermaid_of(picture_of(plan)).split("---\n", 2)
    assert re.fullmatch(r'title: "(?:[^"\\]|\\.)*"\nconfig:\n  flowchart:\n    wrappingWidth: \d+\n', front)
    first, *lines = body.splitlines()
    assert first == "flowchart LR"
    for line in lines:
        assert any(form.fullmatch(line) for form in MERMAID), line
    known = {match[1] for line in lines if (match := re.match(r"  (?:  |subgraph )?(\w+)[\[(]", line))}
    classes = {match[1] for line in lines if (match := re.match(r"  classDef (\w+)", line))}
    for line in lines:
        if edge := re.fullmatch(r"  (\w+) (?:---|==>).*? ?(\w+)", line):
            assert {edge[1], edge[2]} <= known, line
        if used := re.search(r":::(\w+)$", line):
            assert used[1] in classes, line
    assert lines.count("  end") == sum(line.startswith("  subgraph") for line in lines)
    return lines


def test_every_device_and_link_once() -> None:
    plan = made(EMULATED, memory_bytes=(GIB, None, 2 * GIB, 100))
    picture = picture_of(plan)
    assert [device.id for device in picture.devices] == [device.id for device in EMULATED]
    assert len({device.key for device in picture.devices}) == 4
    assert sum(device.share or 0 for device in picture.devices) == pytest.approx(1)
    assert sum(device.samples or 0 for device in picture.devices) == 48
    assert picture.devices[0].link == Rate("pcie4x16", 31.508)
    assert picture.devices[0].lines() == [
        "NVIDIA · float32",
        "25.0% · 12 samples a step",
        "needs 1.0 of 24 GiB",
    ]
    assert picture.devices[1].lines()[-1] == "memory 24 GiB"
    assert picture.devices[3].lines()[-1] == "needs < 0.1 of 16 GiB"
    assert picture.exchange is not None
    assert (picture.exchange.what, picture.exchange.when) == ("gradients", "each step")
    assert not picture.exchange.direct
    lines = mermaid(plan)
    assert [line for line in lines if " ---|" in line] == [
        f'  d{place} ---|"{rate}"| m0_memory'
        for place, rate in enumerate(["pcie4x16<br/>31.5 GB/s"] * 3 + ["pcie3x16<br/>15.8 GB/s"])
    ]
    source = dot_of(picture)
    for place in range(4):
        assert len(re.findall(rf"^\s*d{place} \[", source, re.MULTILINE)) == 1
        assert len(re.findall(rf"^\s*d{place}:e -> m0_memory:d{place}:w", source, re.MULTILINE)) == 1


def test_links_of_real_devices_are_not_guessed() -> None:
    plan = made(REAL)
    picture = picture_of(plan)
    assert [device.link for device in picture.devices] == [None] * 3
    assert picture.warning is None
    assert picture.devices[0].lines() == ["NVIDIA · float32", "33.3% · 12 samples a step", "memory 24 GiB"]
    assert picture.devices[1].lines()[-1] == "python …/long/way/to/envs/xpu/bin/python"
    assert "  d0 --- m0_memory" in mermaid(plan)
    assert not re.search(r"classDef emulated|GB/s|EMULATED", mermaid_of(picture))
    assert "dashed" not in dot_of(picture)


@pytest.mark.parametrize(
    ("generation", "lanes", "told"),
    [
        (4, 16, "pcie4x16, 31.5 GB/s"),
        (3, 4, "pcie3x4, 3.94 GB/s"),
        (1, 1, "pcie1x1, 0.25 GB/s"),
        (9, 16, None),
    ],
)
def test_links_of_real_devices_that_the_driver_tells(generation: int, lanes: int, told: str | None) -> None:
    card = replace(REAL[0], pcie_generation=generation, pcie_lanes=lanes)
    (device,) = picture_of(made([card], "single.Single")).devices
    assert (str(device.link) if device.link is not None else None) == told


def test_emulated_and_altered_devices_are_labelled() -> None:
    slow = replace(REAL[0], slow=2.0)
    picture = picture_of(made([EMULATED[0], slow, REAL[2]]))
    assert picture.warning == "EMULATED: no number of this run is hardware's"
    assert [device.emulated for device in picture.devices] == [True, True, False]
    text, source = mermaid_of(picture), dot_of(picture)
    assert "  class d0,d1 emulated\n" in text
    assert text.count("altered: not as it is") == source.count("altered: not as it is") == 1
    assert source.count('style="rounded,filled,dashed"') == 2
    assert "EMULATED: no number" in text
    assert "EMULATED: no number" in source
    altered = picture_of(made([slow])).warning
    assert altered == "DEVICES NOT AS THEY ARE: no number of this run is hardware's"


def test_stages_cover_the_layers_and_arrows_follow_them() -> None:
    picture = picture_of(pipelines())
    for pipeline in (0, 1):
        layers = sorted((o.first, o.end) for d in picture.devices for o in d.layers if o.pipeline == pipeline)
        assert layers[0][0] == 0
        assert layers[-1][1] == 6
        assert all(one[1] == other[0] for one, other in zip(layers, layers[1:], strict=False))
    assert [device.rank for device in picture.devices] == [3, 0, 1, 2]  # stages below each other
    assert {(a.sender, a.receiver, a.pipeline) for a in picture.arrows} == {("d3", "d0", 0), ("d1", "d2", 1)}
    assert picture.lines[1:] == (
        "pipeline 0: 30 samples a step in 8 microbatches (1F1B)",
        "pipeline 1: 18 samples a step in 8 microbatches (1F1B)",
    )
    assert picture.devices[0].lines()[1:3] == ["pipeline 0", "stage 0: layers 0–1"]
    assert picture.exchange is not None
    assert picture.exchange.what == "gradients of the same layers"
    lines = mermaid(pipelines())
    assert [line.split("==>")[0].strip() for line in lines if "==>" in line] == ["d3", "d1"]
    assert dot_of(picture).count("activations ↓") == 2


def test_one_pipeline_round_two_devices() -> None:
    stages = ((Stage(0, 0, 0, 1), Stage(0, 2, 2, 3)), (Stage(0, 1, 1, 2), Stage(0, 3, 3, 4)))
    arguments = {"schedule": "Interleaved1F1B", "num_microbatches": 4}
    plan = made(
        EMULATED[:2], "pipeline.Pipeline", arguments=arguments, stages=stages, replica_batch_sizes=(24,)
    )
    picture = picture_of(plan)
    assert picture.exchange is None
    assert picture.lines[1] == "pipeline: 24 samples a step in 4 microbatches (Interleaved1F1B)"
    assert {(a.sender, a.receiver) for a in picture.arrows} == {("d0", "d1"), ("d1", "d0")}
    assert picture.devices[0].lines()[1:3] == ["stage 0: layer 0", "stage 2: layer 2"]
    assert len([line for line in mermaid(plan) if "==>" in line]) == 2


def test_machines_and_the_network_between_them() -> None:
    devices = [replace(device, host="a" if place < 2 else "b") for place, device in enumerate(EMULATED)]
    network = shipped().links["ethernet_10g"].model_dump()
    plan = made(devices, network=network)
    plan.config["hardware"]["network"] = "ethernet_10g"
    picture = picture_of(plan)
    assert [(m.name, [d.key for d in m.devices]) for m in picture.machines] == [
        ("machine a", ["d0", "d1"]),
        ("machine b", ["d2", "d3"]),
    ]
    assert str(picture.network) == "ethernet_10g, 1.25 GB/s"
    lines = mermaid(plan)
    assert "  m0_memory --- exchange" in lines
    assert "  m1_memory --- exchange" in lines
    assert "network: ethernet_10g, 1.25 GB/s" in "\n".join(lines)
    staged = replace(pipelines(network=network), devices=tuple(devices))
    assert [arrow.network for arrow in picture_of(staged).arrows] == [True, True]


@pytest.mark.parametrize(
    ("strategy", "arguments", "what", "when"),
    [
        ("local_sgd.LocalSGD", {"sync_every": 20, "wire": "int8"}, "weights as int8", "every 20 steps"),
        ("independent.Independent", {}, "models, merged to one", "after the last step"),
        ("independent.Independent", {"merge": False}, None, None),
    ],
)
def test_what_travels(strategy: str, arguments: dict[str, Any], what: str | None, when: str | None) -> None:
    exchange = picture_of(made(EMULATED, strategy, arguments=arguments)).exchange
    assert (exchange and exchange.what, exchange and exchange.when) == (what, when)


def test_gradients_that_travel_as_codes() -> None:
    plan = made(EMULATED)
    plan.config["comm"] = {"wire": "int8"}
    exchange = picture_of(replace(plan, route=Topology.flat("shm", len(EMULATED)))).exchange
    assert exchange is not None
    assert (exchange.what, exchange.how) == ("gradients as int8", "shm, through host memory")


def test_cards_of_one_vendor_exchange_over_their_own_links() -> None:
    twins = [replace(EMULATED[0], id=f"emulated:{place}", index=place) for place in range(3)]
    ring = picture_of(made(twins)).exchange
    assert ring is not None
    assert (ring.how, ring.direct, ring.members) == ("ring over the cards' links", True, ("d0", "d1", "d2"))
    real = [replace(REAL[0], id=f"cuda:{place}") for place in range(2)]
    nccl = replace(made(real), collective_backend="nccl")
    exchange = picture_of(nccl).exchange
    assert exchange is not None
    assert exchange.how == "nccl ring"
    levels = Topology(((Group("nccl", (0, 1)),), (Group("shm", (0, 2)),)))
    mixed = picture_of(replace(made([*real, REAL[1]]), route=levels)).exchange
    assert mixed is not None
    assert (mixed.how, mixed.direct) == ("nccl + shm, through host memory", False)
    assert [line for line in mermaid(nccl) if "exchange ---" in line] == [
        "  exchange --- d0",
        "  exchange --- d1",
    ]


def test_cards_of_one_process() -> None:
    cards = tuple(replace(REAL[0], id=f"cuda:{place}") for place in range(2))
    changes = {"cards": cards, "card_shares": (0.75, 0.25), "memory_bytes": (GIB,)}
    picture = picture_of(made(list(cards[:1]), "dp.DP", **changes))
    assert [(d.rank, d.id, d.samples) for d in picture.devices] == [(0, "cuda:0", 9), (0, "cuda:1", 3)]
    assert picture.exchange is not None
    assert picture.exchange.how == "one process"


def test_what_takes_no_part_is_shown_without_a_link() -> None:
    plan = replace(made(EMULATED[:2]), left_out=(EMULATED[2],))
    picture = picture_of(plan)
    assert (picture.devices[2].rank, picture.devices[2].id) == (None, "emulated:2")
    lines = mermaid(plan)
    assert any(line.startswith("    out0[") and line.endswith(":::out") for line in lines)
    assert not any(line.strip().startswith("out0 ---") for line in lines)
    assert "out0:e" not in dot_of(picture)


def test_the_plan_keeps_who_is_left_out(tmp_path: Path) -> None:
    plan = replace(made(EMULATED[:2]), left_out=(EMULATED[2],))
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


def test_a_script_decides_its_own_samples() -> None:
    plan = made(EMULATED[:2], script="/home/me/train.py")
    picture = picture_of(replace(plan, config={**plan.config, "trainer": {}}))
    assert picture.lines == ("strategy ddp · balancing equal",)
    assert picture.devices[0].lines()[1] == "50.0%"


def test_passes_and_long_names() -> None:
    plan = replace(
        made(EMULATED[:2], microbatch_sizes=(5, 12)), name=",".join(["hardware.devices=[cpu]"] * 12)
    )
    picture = picture_of(plan)
    assert picture.devices[0].lines()[2] == "in microbatches of at most 5"
    assert picture.devices[1].microbatch_size is None  # all samples in one pass
    assert len(picture.title) == MOST_TITLE_LINES
    assert max(map(len, picture.title)) < 70
    assert picture.title[-1].endswith("…")


def test_a_strategy_that_is_not_on_this_machine() -> None:
    plan = made(EMULATED[:2])
    plan.config["strategy"] = {"_target_": "nowhere.Mine"}
    assert picture_of(plan).exchange is None
    assert mermaid(plan)


def odd(plan: Plan) -> Plan:
    devices = [replace(d, name=ODD, id=ODD, python=ODD, host=ODD) for d in plan.devices]
    return replace(plan, name=ODD, devices=tuple(devices))


def test_odd_names_stay_names() -> None:
    for plan in (odd(made(EMULATED[:2])), odd(pipelines())):
        text = "\n".join(mermaid(plan))
        assert "#60;b#62;#34;x#34;#60;/b#62; #38; #96;y#96; #35;1;" in text
        assert "\x07" not in text
        assert "\x07" not in dot_of(picture_of(plan))


@needs_dot
def test_dot_draws_what_is_written(tmp_path: Path) -> None:
    for place, plan in enumerate(
        [odd(made(EMULATED)), odd(pipelines()), made(REAL), made(REAL[:1], "single.Single")]
    ):
        folder = tmp_path / str(place)
        folder.mkdir()
        drawn = write_diagrams(plan, folder, remarks=["A remark & more."])
        assert (drawn.problem, [path.name for path in drawn.paths]) == (
            None,
            [f"plan.{kind}" for kind in FORMATS],
        )
        texts = [text or "" for text in ElementTree.parse(folder / "plan.svg").getroot().itertext()]
        shown = " ".join(" ".join(texts).split())
        assert "A remark & more." in shown
        for device in plan.devices:
            assert shown.count(f"· {device.id.splitlines()[0]}"[:12]) >= 1
        assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / "plan.pdf").read_bytes().startswith(b"%PDF")


@needs_dot
def test_a_drawing_for_a_page_has_ids_of_its_own() -> None:
    one, other = svg_of(made(EMULATED), "run-1"), svg_of(made(EMULATED), "run-2")
    assert one is not None
    assert other is not None
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    ElementTree.fromstring(one)
    assert one.startswith('<svg id="run-1" ')
    assert '[data-theme="dark"] #run-1 ' in one
    assert DARK[VENDOR_COLOURS["nvidia"][0]] in one
    assert "<title>" not in one
    assert "<?xml" not in one


def test_without_dot_there_is_mermaid_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    drawn = write_diagrams(made(EMULATED), tmp_path)
    assert [path.name for path in drawn.paths] == ["plan.mmd"]
    assert drawn.problem == NO_DOT
    assert all(word in NO_DOT for word in ("apt install graphviz", "brew install", "conda install"))
    assert svg_of(made(EMULATED)) is None


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo odd font >&2; exit 3", "plan.svg is not drawn: dot says 'odd font'."),
        ("exec sleep 60", "plan.svg is not drawn: dot took more than 0.2 s."),
    ],
)
def test_a_dot_that_fails_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    (tmp_path / "dot").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(diagram, "DOT_SECONDS", 0.2 if "sleep" in script else 20.0)
    drawn = write_diagrams(made(EMULATED), tmp_path, ("mmd", "svg"))
    assert [path.name for path in drawn.paths] == ["plan.mmd"]
    assert drawn.problem == told


def test_colours_of_both_schemes_can_be_read() -> None:
    """Text and ground differ by 4.5 : 1 and more (WCAG 2.2, 1.4.3), on light and dark pages."""
    from hetexp.report.diagram.dot import EXCHANGE_FILL, INK, MUTED, PANEL, PAPER, WARNING

    grounds = [PAPER, PANEL, EXCHANGE_FILL, *(ground for _, ground in VENDOR_COLOURS.values())]
    for text in (INK, MUTED):
        for ground in grounds:
            assert contrast(text, ground) >= 4.5, (text, ground)
            assert contrast(DARK[text], DARK[ground]) >= 4.5, (text, ground)
    assert contrast(WARNING, PAPER) >= 4.5
    assert contrast(DARK[WARNING], DARK[PAPER]) >= 4.5


def contrast(one: str, other: str) -> float:
    """Return the ratio of two colours' relative luminances."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_report_draws_without_torch() -> None:
    code = "import sys, hetexp.report.diagram.files; sys.exit('torch' in sys.modules)"
    import sys

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
