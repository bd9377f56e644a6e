"""Leases of cards: one run at a time, and none after its owner is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.lease import Leases, folder, holder

CARD = DeviceSpec("cuda:0", "cuda", 0, "RTX 3090", "nvidia", uuid="GPU-8932f937")
OTHER = DeviceSpec("cuda:1", "cuda", 1, "RTX 4090", "nvidia", uuid="GPU-aaaa")
CPU = DeviceSpec("cpu:0", "cpu", 0, "CPU", "cpu")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_lease_is_held_and_given_back() -> None:
    assert holder(CARD) is None
    with Leases([CARD], "outputs/one"):
        assert holder(CARD) is not None
        assert f"the run outputs/one (process {os.getpid()} of " in str(holder(CARD))
        assert holder(OTHER) is None
    assert holder(CARD) is None
    assert not list(folder().glob("*.json"))


def test_the_second_run_is_refused_and_keeps_nothing() -> None:
    with Leases([CARD], "outputs/one"):
        with pytest.raises(SetupError, match="cuda:0 .* is held by the run outputs/one"):
            Leases([OTHER, CARD], "outputs/two").__enter__()
        assert holder(OTHER) is None
    with Leases([OTHER, CARD], "outputs/two"):
        assert "outputs/two" in str(holder(OTHER))


def test_ranks_that_share_a_card_take_one_lease() -> None:
    with Leases([CARD, CARD], "outputs/one"):
        assert holder(CARD) is not None


def test_the_cpu_is_everybodys() -> None:
    with Leases([CPU], "outputs/one"), Leases([CPU], "outputs/two"):
        assert holder(CPU) is None


def test_a_lease_ends_with_its_owner_however_that_one_ends(tmp_path: Path) -> None:
    code = (
        "import sys, tempfile\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from hetexp.core.device import DeviceSpec\n"
        "from hetexp.hardware.lease import Leases\n"
        f"card = DeviceSpec('cuda:0', 'cuda', 0, 'RTX 3090', 'nvidia', uuid={CARD.uuid!r})\n"
        "lease = Leases([card], 'killed')\n"
        "lease.__enter__()\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    assert owner.stdout.readline() == "held\n"
    assert f"the run killed (process {owner.pid} of " in str(holder(CARD))
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    owner.stdin.close()
    owner.stdout.close()
    assert holder(CARD) is None
    with Leases([CARD], "outputs/next"):
        assert "outputs/next" in str(holder(CARD))


def test_a_broken_note_is_no_reason_to_fail() -> None:
    with Leases([CARD], "outputs/one"):
        for note in folder().glob("*.json"):
            note.write_text("{")
        assert holder(CARD) == "another hetexp run"
