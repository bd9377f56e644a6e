"""ROCm's list of GPUs as the kernel shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_drivers import (
    GIB,
    RAPHAEL,
    RX_6600,
    RX_7900_XTX,
    add_kfd_process,
    amd,
    gpu_id,
    recorded_machine,
    write,
)

from hetexp.hardware.backends import kfd
from hetexp.hardware.detection.detected import Process
from hetexp.hardware.detection.machine import Machine

NODES = "/sys/class/kfd/kfd/topology/nodes"


def test_processors_are_no_gpus_and_do_not_count(tmp_path: Path) -> None:
    nodes = kfd.nodes(recorded_machine(tmp_path, RX_7900_XTX, RAPHAEL, kfd=[RAPHAEL, RX_7900_XTX]))
    assert [(node.index, node.address, node.architecture) for node in nodes] == [
        (0, "0000:10:00.0", "gfx1036"),
        (1, "0000:03:00.0", "gfx1100"),
    ]
    assert [node.uuid for node in nodes] == [None, "GPU-61ad34e0f1c2b3a4"]


def test_a_short_number_of_a_chip_is_padded(tmp_path: Path) -> None:
    (node,) = kfd.nodes(recorded_machine(tmp_path, RX_6600))
    assert node.uuid == "GPU-000000000000beef"


@pytest.mark.parametrize(
    ("version", "name"),
    [(110000, "gfx1100"), (90010, "gfx90a"), (90012, "gfx90c"), (90402, "gfx942"), (110501, "gfx1151")],
)
def test_architectures_by_their_number(tmp_path: Path, version: int, name: str) -> None:
    card = replace(RX_7900_XTX, gfx=version)
    (node,) = kfd.nodes(recorded_machine(tmp_path, card))
    assert node.architecture == name


def test_addresses_in_other_domains_and_of_later_functions(tmp_path: Path) -> None:
    card = amd("0001:c5:1f.3", 0x744C, 110000)
    (node,) = kfd.nodes(recorded_machine(tmp_path, card))
    assert node.address == "0001:c5:1f.3"


def test_nodes_are_ordered_by_number_and_not_by_name(tmp_path: Path) -> None:
    cards = [amd(f"0000:{bus:02x}:00.0", 0x744C, 110000) for bus in range(1, 13)]
    nodes = kfd.nodes(recorded_machine(tmp_path, *cards))
    assert [node.address for node in nodes] == [card.address for card in cards]


@pytest.mark.parametrize("file", ["gpu_id", "properties"])
def test_a_node_of_another_container_does_not_count(tmp_path: Path, file: str) -> None:
    machine = recorded_machine(tmp_path, RAPHAEL, RX_7900_XTX)
    path = tmp_path / f"{NODES}/1/{file}".lstrip("/")
    path.unlink()
    path.mkdir()  # reading fails
    assert [(node.index, node.address) for node in kfd.nodes(machine)] == [(0, RX_7900_XTX.address)]


def test_a_node_without_its_device_file_does_not_count(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, RAPHAEL, RX_7900_XTX, absent=["/dev/dri/renderD128"])
    assert [node.address for node in kfd.nodes(machine)] == [RX_7900_XTX.address]


def test_without_the_driver_there_is_no_list(tmp_path: Path) -> None:
    assert kfd.nodes(Machine(root=tmp_path)) == []
    assert kfd.computing(Machine(root=tmp_path), [1]) == {}


def test_who_holds_memory_or_has_a_queue_computes(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, RX_7900_XTX)
    gpu = gpu_id(RX_7900_XTX)
    add_kfd_process(tmp_path, 10, {gpu: 3 * GIB})
    add_kfd_process(tmp_path, 9, {gpu: 0}, queues=[gpu, gpu])
    add_kfd_process(tmp_path, 8, {gpu: 0}, queues=[7])
    write(tmp_path, {"/sys/class/kfd/kfd/proc/notes": "x"})
    assert kfd.computing(machine, [gpu]) == {gpu: (Process(9, None), Process(10, 3 * GIB))}
