"""The secret that the machines of a cluster share: in a file or a variable, and never in an output."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from pathlib import Path

from hetexp.core.cluster import ClusterConfig
from hetexp.core.errors import SetupError
from hetexp.hardware.detection.builds import home
from hetexp.launch.processes.process import CLUSTER_TOKEN

MIN_LENGTH = 32
"""Characters of a token: someone who recorded a handshake could guess a shorter one."""


def default_token_file() -> Path:
    """Return the default file of the token."""
    return home() / "cluster.token"


def new_token() -> str:
    """Return a secret that cannot be guessed: 256 bits as 64 hexadecimal digits."""
    return secrets.token_hex(32)


def write_token(path: Path, token: str) -> None:
    """Write a token into a new file that only its owner may read.

    Raises:
        FileExistsError: there is a file already.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(token + "\n")


def read_token(cluster: ClusterConfig, working_dir: Path) -> bytes:
    """Return the token of this machine.

    Raises:
        SetupError: there is none, it is too short, or others than its owner may read it.
    """
    named = cluster.token_file
    variable = os.environ.get(CLUSTER_TOKEN, "").strip()
    if named is None and variable:
        return _checked(variable, f"The variable {CLUSTER_TOKEN}")
    path = working_dir / Path(named).expanduser() if named is not None else default_token_file()
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise SetupError(
            f"The machines of a cluster must share a secret, but {path} cannot be read ({error.strerror}). "
            f"`hetexp init` writes it; copy it to every machine, or set {CLUSTER_TOKEN} there."
        ) from None
    if sys.platform != "win32" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SetupError(
            f"{path} must be readable by its owner only, but has mode {stat.S_IMODE(mode):o}: "
            f"chmod 600 {path}"
        )
    return _checked(text, str(path))


def _checked(token: str, where: str) -> bytes:
    if len(token) < MIN_LENGTH:
        raise SetupError(
            f"{where} must hold a secret of at least {MIN_LENGTH} characters, but has {len(token)}. "
            "`hetexp init` makes one."
        )
    return token.encode()
