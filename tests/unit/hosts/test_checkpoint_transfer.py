"""A checkpoint on its way between two machines, over a real connection."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hetexp.checkpoint.manifest import MANIFEST, verify, write_folder
from hetexp.core.errors import CheckpointError
from hetexp.hosts.channel import Channel, WireError
from hetexp.hosts.checkpoint_transfer import receive_folder, send_folder

KEY = b"k" * 32


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with write_folder(tmp_path / "checkpoints", 4) as folder:
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 20_000)
        (folder / "empty.json").write_bytes(b"")
    return tmp_path / "checkpoints" / "step_00000004"


def carry(send: Callable[[Channel], object], target: Path) -> None:
    """Let something be sent to `receive_folder`."""
    near, far = socket.socketpair()
    leader, member = Channel(near, KEY, leads=True), Channel(far, KEY, leads=False)

    def lead() -> None:
        with near:
            send(leader)

    thread = threading.Thread(target=lead)
    thread.start()
    try:
        with far:
            receive_folder(member, target, 5.0)
    finally:
        thread.join()


def test_it_arrives_whole(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "there" / checkpoint.name
    carry(lambda channel: send_folder(channel, checkpoint), target)
    verify(target)
    for path in checkpoint.iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_byte_that_differs_is_found(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    target = tmp_path / "there" / checkpoint.name
    with pytest.raises(CheckpointError, match="checksum"):
        carry(lambda channel: send_folder(channel, checkpoint), target)
    assert not target.exists()


@pytest.mark.parametrize("name", ["../stolen", "/etc/stolen", "", ".hidden", 5, None])
def test_no_file_lands_elsewhere(name: object, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "there" / checkpoint.name
    with pytest.raises(WireError, match="no file of a checkpoint"):
        carry(lambda channel: channel.send({"name": name, "bytes": 0}), target)
    assert not (tmp_path / "stolen").exists()
    assert not target.exists()


def test_a_leader_that_goes_leaves_no_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    def half(channel: Channel) -> None:
        channel.send({"name": "model.safetensors", "bytes": 100})
        channel.connection.sendall(b"x" * 50)

    target = tmp_path / "there" / checkpoint.name
    with pytest.raises(ConnectionResetError):
        carry(half, target)
    assert not target.exists()


def test_a_manifest_that_is_none_is_reported(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "there" / checkpoint.name
    with pytest.raises(CheckpointError):
        carry(lambda channel: channel.send({"manifest": json.dumps({"format": 1})}), target)
    assert (checkpoint / MANIFEST).exists()
