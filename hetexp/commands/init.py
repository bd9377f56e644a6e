"""`hetexp init`: writes an experiment from five answers, and for several machines their file and secret."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hetexp.commands.support.command_line import command_parser, exit_code
from hetexp.core.cluster import DEFAULT_PORT, ClusterConfig, HostEntry, cluster_problems
from hetexp.core.errors import ConfigError, SetupError, must_be
from hetexp.core.files import write_text
from hetexp.hosts.token import default_token_file, new_token, write_token

_EPILOG = """examples:
  hetexp init            asks five questions; Enter takes the answer in brackets
  hetexp init --yes      takes all of them: conf/experiment/mine.yaml
  hetexp init --host desktop=192.168.1.10 --host macbook=192.168.1.11
  hetexp init --name lab --host a=10.0.0.1 --host b=10.0.0.2 --devices b=cuda:0,cpu

--host asks nothing and writes the machines and their secret alone. Copy both files to every machine, and run
the same command on each of them: hetexp train cluster=lab"""
_DATA = {"gpt": "text", "hf_causal_lm": "sft_jsonl", "sae": "digit_vectors"}
"""Model → data that it is made for; others: `digits`."""


def main(arguments: Sequence[str]) -> int:
    """Write the files; return 2 if an argument or an answer is wrong."""
    about = "Ask five questions and write conf/experiment/NAME.yaml, and conf/cluster/NAME.yaml for machines."
    parser = command_parser("init", about, _EPILOG)
    parser.add_argument("--name", help="of the files (mine; with --host lab)")
    parser.add_argument("--yes", action="store_true", help="ask nothing and take the answers in brackets")
    parser.add_argument(
        "--host", action="append", default=[], metavar="NAME=ADDRESS", help="a machine; the first one leads"
    )
    parser.add_argument(
        "--devices", action="append", default=[], metavar="NAME=LIST", help="of a machine: cuda:0,cpu (auto)"
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"of the leader ({DEFAULT_PORT})")
    parser.add_argument("--token-file", type=Path, help="where the secret is written (hetexp's own folder)")
    parser.add_argument("--force", action="store_true", help="overwrite files of this name")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _init(options), drives_torch=False)


def _init(options: argparse.Namespace) -> int:
    name = options.name or ("lab" if options.host else "mine")
    if not name.isidentifier() or name == "none":
        raise ConfigError(f"`--name` must be a word, not none, but is '{name}' instead.")
    hosts = dict(_pair("--host", text) for text in options.host)
    devices = dict(_pair("--devices", text) for text in options.devices)
    folder, files = Path.cwd() / "conf", {}
    if not options.host:
        answers = ask((lambda _: "") if options.yes else _read)
        hosts = dict(_pair("machines", text) for text in answers["machines"].split())
        files[folder / "experiment" / f"{name}.yaml"] = experiment(name, answers)
    unknown = [host for host in devices if host not in hosts]
    if unknown:
        raise ConfigError(f"`--devices` must name machines, but names {', '.join(unknown)} instead.")
    if not 1 <= options.port <= 65535:
        raise ConfigError(f"`--port` must be from 1 to 65535, but is {options.port} instead.")
    if hosts:
        entries = [HostEntry(name=host, address=address) for host, address in hosts.items()]
        cluster = ClusterConfig(hosts=entries, port=options.port)
        if problems := cluster_problems(cluster, None):
            raise ConfigError(problems)
        default = "auto" if options.host else "null"  # null: as the experiment says
        devices = {host: devices.get(host, default) for host in hosts}
        files[folder / "cluster" / f"{name}.yaml"] = as_yaml(cluster, devices, options.token_file)
    for path in files:
        if path.exists() and not options.force:
            raise SetupError(f"{path} exists already: --force overwrites it, --name chooses another name.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        print(path)
    if hosts:
        secret = options.token_file or default_token_file()
        existed = secret.exists()
        if not existed:
            write_token(secret, new_token())
        print(f"{secret}: the secret{', which existed already' if existed else ', which only you may read'}")
        print("Copy all to the same places on every machine (scp keeps the secret secret), and run there:")
    command = "python train.py" if Path("train.py").exists() else "hetexp train"
    print(f"  {command} {'cluster' if options.host else 'experiment'}={name}")
    return 0


def ask(read: Callable[[str], str]) -> dict[str, str]:
    """Return the answers: `hardware`, `machines` (empty: this one alone), `model`, `data` and `logger`.

    Args:
        read: function that shows a question and returns the answer; an empty one takes the default.
    """
    from hetexp.core.compose.options import group_options
    from hetexp.hardware.detection.inventory import detect

    problems: list[str] = []

    def choose(group: str, question: str, default: str) -> str:
        known = ", ".join(sorted(set(group_options(group)) - {"custom"}))
        answer = read(f"{question} {known} [{default}]: ").strip() or default
        if answer not in known.split(", ") and (group == "logger" or _option(group, answer) == answer):
            known += {"hardware": ", or devices (cuda:0,cpu)", "logger": ""}.get(
                group, ", or a class (my.Net)"
            )
            problems.append(must_be(group, f"one of {known}", answer))
        return answer

    usable = [card.spec.id for card in detect().cards if card.state == "available"]
    here = f"here: {', '.join([*usable, 'cpu'])}; a list, or one of"
    answers = {"hardware": choose("hardware", f"1. Devices ({here})", "auto")}
    answers["machines"] = read("2. Machines, the leading one first: a=10.0.0.1 b=10.0.0.2 [this one alone]: ")
    answers["model"] = choose("model", "3. Model, a class as my_project.Net, or one of", "convnet")
    data = _DATA.get(answers["model"], "digits")
    answers["data"] = choose("data", "4. Data, a class as my_project.Images, or one of", data)
    answers["logger"] = choose("logger", "5. Tracker, one of", "wandb")
    if problems:
        raise ConfigError(problems)
    return answers


def _read(question: str) -> str:
    try:
        return input(question)
    except EOFError:
        fix = "--yes takes the answers in brackets, --host NAME=ADDRESS asks nothing."
        raise ConfigError(f"The input must answer five questions, but ends before. {fix}") from None
    finally:
        print("" if sys.stdin.isatty() else "\n", end="")  # typed answers end the line themselves


def _option(group: str, answer: str) -> str:
    """Return the group's option for an answer, which may be a class, or a list of devices."""
    if group == "hardware":
        return "auto" if ":" in answer or "," in answer else answer
    return "custom" if "." in answer else answer


def experiment(name: str, answers: Mapping[str, str]) -> str:
    """Return an experiment as YAML, with the options and values of the answers of `ask`."""
    lines = ["# @package _global_", f"# By hetexp init: hetexp train experiment={name}", "defaults:"]
    values = []
    for group in ("hardware", "model", "data", "logger"):
        answer, option = answers[group], _option(group, answers[group])
        lines.append(f"  - override /{group}: {option}")
        if option != answer:
            devices = f"devices: [{answer}]"
            values += [f"{group}:", f"  {devices if group == 'hardware' else f'_target_: {answer}'}"]
    lines += [f"  - override /cluster: {name}"] if answers["machines"].strip() else []
    return "\n".join([*lines, *values]) + "\n"


def as_yaml(cluster: ClusterConfig, devices: Mapping[str, str], token_file: Path | None) -> str:
    """Return a cluster as YAML, for the user to read and change."""
    lines = ["# The machines of a run; the same command on each of them.", "hosts: # the first one leads"]
    for host in cluster.hosts:
        names = devices.get(host.name, "auto")
        if names not in ("auto", "null"):
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
