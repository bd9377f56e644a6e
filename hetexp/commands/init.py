"""`hetexp init`: the file that names the machines of a cluster, and the secret that they share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hetexp.commands.support.command_line import command_parser, exit_code
from hetexp.core.cluster import DEFAULT_PORT, ClusterConfig, HostEntry, cluster_problems
from hetexp.core.errors import ConfigError, SetupError
from hetexp.core.files import write_text
from hetexp.hosts.token import default_token_file, new_token, write_token

_EPILOG = """examples:
  hetexp init                                             asks for the machines
  hetexp init --host desktop=192.168.1.10 --host macbook=192.168.1.11
  hetexp init --name lab --host a=10.0.0.1 --host b=10.0.0.2 --devices b=cuda:0,cpu

Then copy both files to every machine, and run the same command on each of them:
  python train.py cluster=lab"""


def main(arguments: Sequence[str]) -> int:
    """Write both files; return 2 if an argument is wrong."""
    about = "Write conf/cluster/NAME.yaml, which names the machines of a cluster, and their token."
    parser = command_parser("init", about, _EPILOG)
    parser.add_argument("--name", default="lab", help="of the file, for cluster=NAME (lab)")
    parser.add_argument(
        "--host", action="append", default=[], metavar="NAME=ADDRESS", help="a machine; the first one leads"
    )
    parser.add_argument(
        "--devices", action="append", default=[], metavar="NAME=LIST", help="of a machine: cuda:0,cpu (auto)"
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"of the leader ({DEFAULT_PORT})")
    parser.add_argument("--token-file", type=Path, help="where the secret is written (hetexp's own folder)")
    parser.add_argument("--force", action="store_true", help="overwrite a file of this name")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _init(options), drives_torch=False)


def _init(options: argparse.Namespace) -> int:
    hosts = [_pair("--host", text) for text in options.host]
    if not hosts and sys.stdin.isatty():
        hosts = ask(input)
    if not hosts:
        raise ConfigError("`--host` must be given for each machine (--host NAME=ADDRESS), but is missing.")
    devices = dict(_pair("--devices", text) for text in options.devices)
    unknown = [name for name in devices if name not in dict(hosts)]
    if unknown:
        raise ConfigError(
            f"`--devices` must name one of the machines, but names {', '.join(unknown)} instead."
        )
    if not 1 <= options.port <= 65535:
        raise ConfigError(f"`--port` must be from 1 to 65535, but is {options.port} instead.")
    if not options.name.isidentifier() or options.name == "none":
        raise ConfigError(f"`--name` must be a word, not none, but is '{options.name}' instead.")
    cluster = ClusterConfig(hosts=[HostEntry(name=n, address=a) for n, a in hosts], port=options.port)
    problems = cluster_problems(cluster, None)
    if problems:
        raise ConfigError(problems)
    path = Path.cwd() / "conf" / "cluster" / f"{options.name}.yaml"
    if path.exists() and not options.force:
        raise SetupError(f"{path} exists already: --force overwrites it, --name chooses another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, as_yaml(cluster, devices, options.token_file))
    token_file = options.token_file or default_token_file()
    try:
        write_token(token_file, new_token())
        note = "the secret of all machines, which only you may read"
    except FileExistsError:
        note = "the secret, which existed already"
    print(f"{path}: the machines\n{token_file}: {note}")
    print(
        "Copy both to the same places on every machine (scp keeps the secret secret), and run there:\n"
        f"  python train.py cluster={options.name}"
    )
    return 0


def ask(read: Callable[[str], str]) -> list[tuple[str, str]]:
    """Return the machines that the user names, the leader first.

    Args:
        read: function that shows a question and returns the answer.
    """
    hosts: list[tuple[str, str]] = []
    while True:
        which = "The leading machine" if not hosts else "Another machine"
        name = read(f"{which}, its name (as `hostname` prints it there; empty: no more): ").strip()
        if not name:
            return hosts
        address = read(f"The address by which the others reach {name}: ").strip()
        hosts.append((name, address))


def as_yaml(cluster: ClusterConfig, devices: dict[str, str], token_file: Path | None) -> str:
    """Return a cluster as YAML, for the user to read and change."""
    lines = ["# The machines of a run; the same command on each of them.", "hosts: # the first one leads"]
    for host in cluster.hosts:
        names = devices.get(host.name, "auto")
        if names != "auto":
            names = f"[{', '.join(name.strip() for name in names.split(','))}]"
        lines += [f'  - name: "{host.name}"', f'    address: "{host.address}"', f"    devices: {names}"]
    lines += [f"port: {cluster.port}"]
    lines += [f'token_file: "{token_file}"'] if token_file is not None else []
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name.strip() or not value.strip():
        raise ConfigError(f"`{flag}` must be NAME=…, but is '{text}' instead.")
    return name.strip(), value.strip()
