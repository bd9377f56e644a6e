"""Sends a checkpoint from the leader to a machine whose ranks resume from it.

After the handshake, the machine names the folder. The leader sends the name and length of each file in a
message with an HMAC, then the bytes. The receiver checks the files by the checksums of the manifest, which
travels within such a message.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hetexp.checkpoint.manifest import MANIFEST, verify
from hetexp.hosts.channel import Channel, WireError

CHUNK_BYTES = 2**20
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
    """Receive what `send_folder` sends; the target appears only when it is complete.

    Args:
        deadline_seconds: longest silence.

    Raises:
        WireError: the other end sent no checkpoint.
        OSError: the connection broke, it was silent for too long, or the disk is full.
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
                chunk = channel.connection.recv(min(left, CHUNK_BYTES))
                if not chunk:
                    raise ConnectionResetError("it closed the connection")
                file.write(chunk)
                left -= len(chunk)
    (new / MANIFEST).write_text(str(message["manifest"]), encoding="utf-8")
    verify(new)
    new.rename(target)
