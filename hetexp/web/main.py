"""`hetexp dashboard`: serve the web page and the API of this machine's devices and trainings."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.commands.support.command_line import command_parser, exit_code

if TYPE_CHECKING:
    from uvicorn import Server

    from hetexp.core.config import MonitorConfig
    from hetexp.web.access import Access

TOKEN_VARIABLE = "HETEXP_DASHBOARD_TOKEN"
PORT = 8765
BACKLOG = 1024
NEEDS = ("fastapi", "uvicorn", "websockets", "sqlalchemy")
_EPILOG = """\
examples
  hetexp dashboard                                      http://127.0.0.1:8765, for this machine only
  ssh -L 8765:127.0.0.1:8765 lab                        the same from elsewhere: open it in your own browser
  HETEXP_DASHBOARD_TOKEN=… hetexp dashboard --host 0.0.0.0 --name lab.example.org"""


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C; return 2 if an argument cannot be used."""
    parser = command_parser(
        "dashboard",
        "Show devices and trainings of this machine in a browser, and start, watch and stop "
        "trainings there. Trainings go on when the server ends, and the next server finds them again.",
        _EPILOG,
    )
    parser.add_argument("overrides", nargs="*", help="monitor.key=value, as for hetexp train")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (127.0.0.1); others need a token"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"by default {PORT}; 0: a free port")
    parser.add_argument(
        "--token", help=f"token that browsers must send; better in {TOKEN_VARIABLE}, which ps does not show"
    )
    parser.add_argument(
        "--name", action="append", default=[], help="another name of this machine, such as a proxy's"
    )
    options = parser.parse_intermixed_args(list(arguments))
    return exit_code(lambda: _run(options), drives_torch=False)


def _run(options: argparse.Namespace) -> int:
    from hetexp.commands.monitor import read_config
    from hetexp.core.errors import ConfigError, SetupError, must_be

    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise SetupError(
            f"The dashboard needs {', '.join(missing)}, which this interpreter lacks; run: "
            "pip install 'hetexp[dashboard]'."
        )
    if not 0 <= options.port < 65536:
        raise ConfigError(must_be("--port", "from 0 to 65535", options.port))
    from hetexp.web.access import Access

    token = options.token or os.environ.get(TOKEN_VARIABLE) or None
    access = Access(options.host, token, tuple(options.name))
    return _serve(access, options.port, read_config(options.overrides))


def _serve(access: Access, port: int, config: MonitorConfig) -> int:
    """Listen, print the address, and serve."""
    from hetexp.web.server import Dashboard, make_app

    listener = _listener(access.host, port)
    try:
        app = make_app(Dashboard(config, access, Path.cwd()))
    except Exception:
        listener.close()
        raise
    shown = f"[{access.host}]" if ":" in access.host else access.host
    print(f"http://{shown}:{listener.getsockname()[1]}", flush=True)
    print("Ctrl-C ends the server; trainings go on.", file=sys.stderr, flush=True)
    server_of(app).run(sockets=[listener])
    return 0


def server_of(app: Any) -> Server:
    """Return the server of an application, with the limits of its connections."""
    import uvicorn

    from hetexp.web.connections import Connection

    settings = uvicorn.Config(
        app,
        http=Connection,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws_max_size=64 * 1024,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=5,
        limit_concurrency=1200,
    )
    return uvicorn.Server(settings)


def _listener(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        SetupError: the port is taken, or the address is not this machine's.
    """
    from hetexp.core.errors import SetupError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit IPPROTO_TCP asyncio sets TCP_NODELAY on connections. Without it an answer in two parts
    # waits for an acknowledgement and takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # before the address is printed: a client may connect at once
    except OSError as error:
        listener.close()
        fix = "Choose another port with --port."
        raise SetupError(f"{host}:{port} cannot be listened on: {error.strerror}. {fix}") from error
    return listener
