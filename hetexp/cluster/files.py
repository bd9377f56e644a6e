"""A checkpoint's folder on its way from the leader, which has it, to a machine whose ranks go on from it.

After the proof, the machine names the folder; the leader tells each file's name and length in a message with
an HMAC and sends its bytes. What has arrived is checked by the checkpoint's own checksums, which its manifest
names: that one travels within such a message.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hetexp.checkpoint.manifest import MANIFEST, verify
from hetexp.cluster.wire import Channel, WireError

PIECE = 2**20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def send_folder(channel: Channel, folder: Path) -> None:
    """Send all files of a checkpoint.

    Raises:
        OSError: the connection broke, or a file cannot be read.
    """
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST:
            continue
        with path.open("rb") as file:
            channel.send({"name": path.name, "bytes": path.stat().st_size})
            channel.connection.sendfile(file)
    channel.send({"manifest": (folder / MANIFEST).read_text(encoding="utf-8")})


def receive_folder(channel: Channel, target: Path, deadline_seconds: float) -> None:
    """Take in what `send_folder` sends, as a folder that is there whole or not at all.

    Args:
        deadline_seconds: longest silence.

    Raises:
        WireError: what came is no checkpoint's.
        OSError: the connection broke, it was silent for too long, or the disk has no room.
        CheckpointError: a file is not what the manifest says.
    """
    channel.connection.settimeout(deadline_seconds)
    new = target.with_name(f"{target.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    while "manifest" not in (message := channel.receive()):
        name, left = message.get("name"), message.get("bytes")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(left, int):
            raise WireError("no file of a checkpoint")
        with (new / name).open("wb") as file:
            while left:
                piece = channel.connection.recv(min(left, PIECE))
                if not piece:
                    raise ConnectionResetError("it closed the connection")
                file.write(piece)
                left -= len(piece)
    (new / MANIFEST).write_text(str(message["manifest"]), encoding="utf-8")
    verify(new)
    new.rename(target)
