"""The mixes of conf/hardware: composed as a person types them, on an empty machine and on the right one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hetexp.app import compose_config, conf_dir
from hetexp.core.config import check_config, read_config
from hetexp.core.device import DeviceSpec
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.inventory import Inventory
from hetexp.hardware.selection.devices import select_devices
from hetexp.hardware.selection.pool import Selection

FILES = sorted((conf_dir() / "hardware").glob("*.yaml"))
BACKENDS = {"nvidia": "cuda", "intel": "xpu", "amd": "hip", "apple": "mps"}
EMULATED = {
    "nvidia": ["rtx_3090"],
    "amd": ["rx_7900_xtx"],
    "arc": ["arc_a770"],
    "nvidia_arc": ["rtx_3090", "arc_a770"],
    "nvidia_amd": ["rtx_3090", "rx_7900_xtx"],
    "amd_arc": ["rx_7900_xtx", "arc_a770"],
    "nvidia_amd_arc": ["rtx_3090", "rx_7900_xtx", "arc_a770"],
    "a100_v100": ["a100", "v100"],
    "mac_nvidia": ["m2_max", "rtx_4090"],
    "eight_mixed": [
        "rtx_4090",
        "rtx_3090",
        "v100",
        "t4",
        "rx_7900_xtx",
        "rx_6600",
        "arc_a770",
        "arc_a380",
    ],
    "mix": ["rtx_4090", "arc_a380"],
}
"""What each mix is on a machine without any accelerator."""


def found(*names: str) -> list[DeviceSpec]:
    """Devices of a pretended machine: `nvidia NVIDIA L4` is an NVIDIA card of that name."""
    devices: list[DeviceSpec] = []
    for text in names:
        vendor, _, name = text.partition(" ")
        backend = BACKENDS[vendor]
        index = sum(device.backend == backend for device in devices)
        devices.append(DeviceSpec(f"{backend}:{index}", backend, index, name, vendor))
    return devices


BOX = found(
    "nvidia NVIDIA GeForce RTX 3070",
    "nvidia NVIDIA GeForce RTX 4090",
    "intel Intel(R) Arc(TM) A380 Graphics",
    "intel Intel(R) Arc(TM) B580 Graphics",
    "amd AMD Radeon RX 7800 XT",
)
CLUSTER = found("nvidia Tesla V100-SXM2-32GB", "nvidia NVIDIA A100-SXM4-80GB", "nvidia NVIDIA A100-SXM4-80GB")
MAC = found("apple Apple M4 Max", "nvidia NVIDIA GeForce RTX 4090")
REAL = {
    "nvidia": (BOX, ["cuda:0", "cuda:1"]),
    "amd": (BOX, ["hip:0"]),
    "arc": (BOX, ["xpu:0", "xpu:1"]),
    "nvidia_arc": (BOX, ["cuda:0", "cuda:1", "xpu:0", "xpu:1"]),
    "nvidia_amd": (BOX, ["cuda:0", "cuda:1", "hip:0"]),
    "amd_arc": (BOX, ["hip:0", "xpu:0", "xpu:1"]),
    "nvidia_amd_arc": (BOX, ["cuda:0", "cuda:1", "hip:0", "xpu:0", "xpu:1"]),
    "a100_v100": (CLUSTER, ["cuda:1", "cuda:2", "cuda:0"]),
    "mac_nvidia": (MAC, ["mps:0", "cuda:0"]),
    "mix": (BOX, ["cuda:1", "xpu:0"]),
}
"""What each mix takes of a machine that has it."""


def raw(*overrides: str) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(
        json.dumps(OmegaConf.to_container(compose_config(overrides), resolve=True))
    )
    return plain


def select(devices: list[DeviceSpec], *overrides: str) -> Selection:
    inventory = Inventory([DetectedCard(device) for device in devices])
    return select_devices(read_config(raw(*overrides)).hardware, inventory)


def chosen(devices: list[DeviceSpec], *overrides: str) -> list[str]:
    selection = select(devices, *overrides)
    assert selection.problems == []
    return [device.id for device in selection.devices]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_opens_with_what_it_is_and_the_command(file: Path) -> None:
    comment = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line)
    assert len(comment) >= 2
    assert comment[-1].startswith(f"#   python train.py hardware={file.stem}")


def test_every_mix_is_tested_here() -> None:
    assert {file.stem for file in FILES} - {"auto", "cpu"} == set(EMULATED)


@pytest.mark.parametrize(("mix", "cards"), EMULATED.items())
def test_emulated_where_nothing_is_found(mix: str, cards: list[str]) -> None:
    selection = select([], f"hardware={mix}")
    assert selection.problems == []
    assert [device.card for device in selection.devices] == cards
    assert all(device.emulated and device.card_facts for device in selection.devices)


@pytest.mark.parametrize(("mix", "machine"), REAL.items())
def test_real_where_all_is_found(mix: str, machine: tuple[list[DeviceSpec], list[str]]) -> None:
    devices, ids = machine
    assert chosen(devices, f"hardware={mix}") == ids


def test_eight_mixed_is_the_same_everywhere() -> None:
    selection = select([*BOX, *found("apple Apple M4 Max")], "hardware=eight_mixed")
    assert [device.card for device in selection.devices] == EMULATED["eight_mixed"]
    assert len({device.card for device in selection.devices}) == 8
    assert len({device.vendor for device in selection.devices}) == 3


@pytest.mark.parametrize("mix", ["nvidia_amd", "mac_nvidia", "a100_v100"])
def test_a_part_of_a_mix_is_emulated_and_says_what_trains_on_the_real_card(mix: str) -> None:
    one = found("nvidia NVIDIA A100-SXM4-80GB")
    selection = select(one, f"hardware={mix}")
    assert not selection.problems
    assert [device.card for device in selection.devices] == EMULATED[mix]
    (own,) = [reason for reason in selection.reasons if "python train.py" in reason]
    assert str(one[0]) in own


@pytest.mark.parametrize("mix", ["nvidia_amd", "mac_nvidia", "a100_v100"])
def test_a_part_of_a_mix_is_an_error_with_the_fix_if_that_is_asked_for(mix: str) -> None:
    one = found("nvidia NVIDIA A100-SXM4-80GB")
    (problem,) = select(one, f"hardware={mix}", "hardware.missing=error").problems
    assert "hardware.missing=emulate" in problem
    assert len(chosen(one, f"hardware={mix}", "hardware.missing=emulate")) == 2
    assert chosen(one, f"hardware={mix}", "hardware.missing=drop") == ["cuda:0"]


# ---------------------------------------------------------------- hardware=mix hardware.cards=[…]


@pytest.mark.parametrize(
    ("typed", "cards"),
    [
        ("[rtx_4090,a380]", ["rtx_4090", "arc_a380"]),
        ("[6600,7900_xtx]", ["rx_6600", "rx_7900_xtx"]),
        ("[t4,t4,desktop_cpu_16]", ["t4", "t4", "desktop_cpu_16"]),
        ("h100", ["h100"]),
        ("4090", ["rtx_4090"]),
    ],
)
def test_cards_as_they_are_typed(typed: str, cards: list[str]) -> None:
    selection = select([], "hardware=mix", f"hardware.cards={typed}")
    assert selection.problems == []
    assert [device.card for device in selection.devices] == cards


def told(*overrides: str) -> list[str]:
    return check_config(raw(*overrides))[1]


def test_cards_without_an_entry() -> None:
    assert told("hardware=mix", "hardware.cards=[]") == [
        "`hardware.cards` must be a list with at least one entry, but is [] instead."
    ]


@pytest.mark.parametrize(("typed", "key"), [("[1.5]", "hardware.cards[0]"), ("true", "hardware.cards[0]")])
def test_cards_of_a_wrong_type(typed: str, key: str) -> None:
    (problem,) = told("hardware=mix", f"hardware.cards={typed}")
    assert problem.startswith(f"`{key}` must be ")


def test_cards_beside_devices() -> None:
    (problem,) = told("hardware.cards=[rtx_4090]")
    assert problem.startswith("`hardware.cards` must be null where `hardware.devices` is given, but is")
    assert "hardware=mix" in problem
    (problem,) = told("hardware=mix", "hardware.devices=[cpu]")
    assert problem.startswith("`hardware.cards` must be null")


def test_neither_cards_nor_devices() -> None:
    (problem,) = told("hardware=mix", "hardware.cards=null")
    assert problem.startswith("`hardware.devices` must be")
    without = raw("hardware=mix")
    del without["hardware"]["devices"], without["hardware"]["cards"]
    (problem,) = check_config(without)[1]
    assert problem.startswith("`hardware.devices` must be given")


# ---------------------------------------------------------------- the other keys


@pytest.mark.parametrize(
    ("entry", "start"),
    [
        ("{device: cpu, efficiency: 0.5}", "`hardware.devices[0].efficiency` must be absent where no card"),
        (
            "{device: 'cuda:0', overhead_seconds: 1e-3}",
            "`hardware.devices[0].overhead_seconds` must be absent where no card",
        ),
        (
            "{vendor: nvidia, efficiency: 0.5}",
            "`hardware.devices[0].efficiency` must be absent where no card",
        ),
        ("{device: 'emulated:t4', efficiency: 1.5}", "`hardware.devices[0].efficiency` must be less than"),
        ("{device: 'emulated:t4', efficiency: 0}", "`hardware.devices[0].efficiency` must be greater than 0"),
        ("{device: 'cuda:0', match: L4}", "`hardware.devices[0].match` must be absent without `vendor`"),
    ],
)
def test_keys_that_make_no_sense_there(entry: str, start: str) -> None:
    (problem,) = told(f"hardware.devices=[{entry}]")
    assert problem.startswith(start)


def test_numbers_are_names_where_a_card_is_named() -> None:
    entry = "{vendor: amd, match: 6600, emulate_as: 6600}"
    selection = select([], f"hardware.devices=[{entry}]")
    assert [device.card for device in selection.devices] == ["rx_6600"]


def test_what_is_said_of_all_emulated_cards() -> None:
    own = "hardware.devices=[{device: 'emulated:t4', efficiency: 0.3},'emulated:a770',cpu]"
    for words, expected in (
        ((own,), [(0.3, 1e-3), (0.02, 1e-3), None]),
        (("hardware=mix", "hardware.cards=[t4,a770]"), [(0.02, 1e-3), (0.02, 1e-3)]),
    ):
        selection = select([], *words, "hardware.efficiency=0.02", "hardware.overhead_seconds=1e-3")
        assert not selection.problems
        facts = [device.card_facts for device in selection.devices]
        assert [one and (one["efficiency"], one["overhead_seconds"]) for one in facts] == expected
        assert "Arc A770 is emulated at efficiency 0.02 instead of the catalogue's 0.45." in selection.reasons
        assert (
            "Arc A770 is emulated with 0.001 s a pass instead of the catalogue's 1e-05." in selection.reasons
        )
    for key in ("efficiency", "overhead_seconds"):
        assert told(f"hardware.{key}=0")[0].startswith(f"`hardware.{key}` must be greater than 0")


def test_a_catalogue_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "my_cards.yaml"
    path.write_text("cards: {rtx_3090: {efficiency: 0.6}}")
    (device,) = select([], "hardware=nvidia", f"hardware.catalogue={path}").devices
    assert device.card_facts is not None
    assert device.card_facts["efficiency"] == 0.6
