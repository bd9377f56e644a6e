"""The TCPStore of the ranks, in the launcher's process, so that it outlives any rank."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from hetexp.core.errors import ConfigError, SetupError, must_be

if TYPE_CHECKING:
    import torch.distributed as dist


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; for port 0 the system picks a free port.

    Raises:
        ConfigError: the port is taken.
        SetupError: the machine has no such address.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if port == 0 or error.errno == errno.EADDRNOTAVAIL:
            raise SetupError(
                f"The launcher must be able to listen on {host}, where the ranks meet, but the system "
                f"does not let it: {error.strerror}. Is the network interface up (ip link set lo up)?"
            ) from None
        accepted = f"a port that this process may open on {host}, or 0 for a free one"
        raise ConfigError(must_be("launch.port", accepted, port, f"{error.strerror}.")) from None
    return listener


def host_store(listener: socket.socket) -> dist.TCPStore:
    """Serve the store on a listening socket, which then belongs to the store."""
    import torch.distributed as dist

    host, port = listener.getsockname()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
