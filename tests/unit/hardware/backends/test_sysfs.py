"""What the kernel tells of any vendor's card."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from fake_drivers import (
    ARC_A770,
    GIB,
    RX_6600,
    RX_7900_XTX,
    FakeCard,
    add_drm_client,
    pci_folder,
    recorded_machine,
    write,
)

from hetexp.hardware.backends import sysfs
from hetexp.hardware.detection.detected import Process
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import PciCard

ADDRESS = ARC_A770.address


def client(number: int, more: dict[str, object], address: str = ADDRESS) -> dict[str, object]:
    return {"drm-driver": "xe", "drm-client-id": number, "drm-pdev": address, **more}


def test_a_card_has_its_nodes_and_sensors(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, RX_7900_XTX)
    in_kernel = sysfs.KernelCard(machine, RX_7900_XTX.address, None)
    card, render = in_kernel.node("card"), in_kernel.node("renderD")
    assert card is not None and card.name == "card0"
    assert render is not None and render.name == "renderD128"
    assert in_kernel.reading(1000, "temp1_input") == 51.0
    assert in_kernel.reading(1000, "temp9_input", "temp1_input") == 51.0


def test_what_is_not_there_is_not_known(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    card = sysfs.KernelCard(machine, ADDRESS, None)
    assert card.node("card") is None
    assert card.sensor("temp1_input") is None
    assert card.reading(1000, "temp1_input") is None
    assert card.off_the_bus() is None
    assert sysfs.host_memory(machine) == (None, None)
    assert sysfs.drm_processes(machine) == {}


@pytest.mark.parametrize("content", ["0", "-1", "", "N/A", OSError])
def test_a_reading_that_says_nothing_is_none_and_not_0(tmp_path: Path, content: object) -> None:
    write(tmp_path, {f"/sys/bus/pci/devices/{ADDRESS}/hwmon/hwmon3/temp1_input": content})
    card = sysfs.KernelCard(Machine(root=tmp_path), ADDRESS, None)
    assert card.reading(1000, "temp1_input") is None


def test_the_hosts_memory(tmp_path: Path) -> None:
    assert sysfs.host_memory(recorded_machine(tmp_path, host_bytes=64 * GIB)) == (64 * GIB, 48 * GIB)


def test_the_version_of_a_driver_is_its_own_or_the_kernels(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path)
    assert sysfs.driver_version(machine, "amdgpu") == "amdgpu of Linux 6.14.0"
    write(tmp_path, {"/sys/module/amdgpu/version": "6.12.12"})
    assert sysfs.driver_version(machine, "amdgpu") == "amdgpu 6.12.12"
    assert sysfs.driver_version(machine, None) is None


def test_a_card_that_does_not_answer_is_lost(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, replace(ARC_A770, answers=False))
    assert "no longer answers" in (sysfs.KernelCard(machine, ADDRESS, None).off_the_bus() or "")


def test_a_card_that_answers_or_sleeps_is_not(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, replace(ARC_A770, answers=False), RX_6600)
    (pci_folder(tmp_path, ARC_A770) / "power/runtime_status").write_text("suspended\n")
    assert sysfs.KernelCard(machine, ADDRESS, None).off_the_bus() is None
    assert sysfs.KernelCard(machine, RX_6600.address, None).off_the_bus() is None


@pytest.mark.parametrize(
    ("driver", "told"),
    [
        ("amdgpu", None),
        (None, "no kernel driver is bound to it; load amdgpu (sudo modprobe amdgpu)"),
        ("vfio-pci", "reserved for a virtual machine (vfio-pci); give it back to amdgpu"),
        ("radeon", "the kernel driver radeon is bound to it, which cannot compute; amdgpu can"),
    ],
)
def test_the_wrong_driver_is_told_with_the_right_one(driver: str | None, told: str | None) -> None:
    why = sysfs.wrong_driver(PciCard("0000:03:00.0", "amd", 0x744C, driver), ("amdgpu",))
    assert (why is None) if told is None else (told in (why or ""))


def test_a_device_file_that_may_not_be_opened_names_the_group(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, ARC_A770, denied=["/dev/dri/renderD128"])
    assert sysfs.closed(machine, "/dev/dri/renderD128", "--device /dev/dri") == (
        "this user may not open /dev/dri/renderD128; add it to the group render "
        "(sudo usermod -aG render $USER) and log in again"
    )


def test_a_device_file_that_a_container_lacks_names_the_option(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, ARC_A770, absent=["/dev/dri/renderD128"])
    told = sysfs.closed(machine, "/dev/dri/renderD128", "--device /dev/dri")
    assert told == (
        "/dev/dri/renderD128 is absent; a container is given it with docker run --device /dev/dri"
    )


def test_an_open_device_file_is_no_reason(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, ARC_A770)
    assert sysfs.closed(machine, "/dev/dri/renderD128", "") is None


def test_who_holds_a_card(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, ARC_A770)
    add_drm_client(tmp_path, 100, 5, client(1, {"drm-resident-vram0": "300 MiB", "drm-cycles-ccs": 77}))
    add_drm_client(tmp_path, 200, 8, client(2, {"drm-resident-vram0": "40960 KiB", "drm-cycles-rcs": 9}))
    add_drm_client(tmp_path, 300, 9, client(3, {"drm-cycles-ccs": 0, "drm-total-cycles-ccs": 123}))
    assert sysfs.drm_processes(machine) == {
        ADDRESS: (
            Process(100, 300 * 2**20, computes=True),
            Process(200, 40 * 2**20, computes=False),
            Process(300, None, computes=False),
        )
    }


def test_a_client_is_counted_once_and_clients_of_a_process_are_added(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, ARC_A770)
    for fd, number in ((5, 1), (6, 1), (7, 2)):
        add_drm_client(tmp_path, 100, fd, client(number, {"drm-resident-vram0": "100 MiB"}))
    add_drm_client(tmp_path, 100, 9, client(1, {"drm-resident-vram0": "1 MiB"}, "0000:07:00.0"))
    found = sysfs.drm_processes(machine)
    assert [process.memory_bytes for process in found[ADDRESS]] == [200 * 2**20]
    assert [process.memory_bytes for process in found["0000:07:00.0"]] == [2**20]


def test_much_memory_means_computing_whatever_the_engine(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, ARC_A770)
    add_drm_client(tmp_path, 100, 5, client(1, {"drm-resident-local0": "2 GiB", "drm-engine-render": "5 ns"}))
    assert sysfs.drm_processes(machine)[ADDRESS] == (Process(100, 2 * GIB, computes=True),)


def test_memory_that_a_driver_tells_in_two_words_counts_once(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, RX_7900_XTX)
    lines = client(1, {"drm-memory-vram": "512 MiB", "drm-resident-vram": "512 MiB"}, RX_7900_XTX.address)
    add_drm_client(tmp_path, 100, 5, lines)
    (process,) = sysfs.drm_processes(machine)[RX_7900_XTX.address]
    assert process.memory_bytes == 512 * 2**20


def test_nonsense_of_a_driver_costs_a_field_and_no_more(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, ARC_A770)
    add_drm_client(tmp_path, 100, 5, client(1, {"drm-resident-vram0": "many pages", "drm-cycles-ccs": "²"}))
    add_drm_client(tmp_path, 200, 5, {"drm-pdev": ADDRESS})
    assert sysfs.drm_processes(machine) == {ADDRESS: (Process(100, None, computes=False),)}


def test_processes_without_a_card_are_passed_over_unread(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, ARC_A770)
    add_drm_client(tmp_path, 100, 5, client(1, {}))
    (tmp_path / "proc/100/fd/6").symlink_to("/dev/null")
    write(tmp_path, {"/proc/100/fdinfo/6": OSError})  # would fail if it were read
    (tmp_path / "proc/7").mkdir()  # a kernel thread, or one that ended
    assert [process.pid for process in sysfs.drm_processes(machine)[ADDRESS]] == [100]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux only")
def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, ARC_A770)
    for pid in range(100, 130):
        add_drm_client(tmp_path, pid, 5, client(pid, {}))
    before = len(list(Path("/proc/self/fd").iterdir()))
    sysfs.drm_processes(machine)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_group_is_that_of_the_file_where_it_is_another_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grp

    path = tmp_path / "kfd"
    path.touch()
    other = next(one for one in grp.getgrall() if one.gr_gid not in (0, *os.getgroups()))
    monkeypatch.setattr(
        Path, "stat", lambda self, **_: os.stat_result([0, 0, 0, 0, 0, other.gr_gid, 0, 0, 0, 0])
    )
    assert sysfs._group(path) == other.gr_name


def test_a_card_without_a_driver_has_no_nodes(tmp_path: Path) -> None:
    card = FakeCard("0000:01:00.0", "intel", 0x56A0, None)
    assert sysfs.KernelCard(recorded_machine(tmp_path, card), card.address, None).node("card") is None
