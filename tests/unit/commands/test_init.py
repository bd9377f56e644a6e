"""`hetexp init` writes what a cluster needs, and keeps its secret secret."""

from __future__ import annotations

import io
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import unbuilt_config

from hetexp.commands.init import main
from hetexp.core.compose.conf_folders import name_own_conf_dir
from hetexp.core.compose.overrides import compose_typed
from hetexp.core.compose.plain import plain
from hetexp.core.config import read_config
from hetexp.hosts.token import default_token_file, read_token


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_writes_machines_and_token(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "a=10.0.0.1", "--host", "b=10.0.0.2", "--devices", "b=cuda:0,cpu"]) == 0
    raw = yaml.safe_load((folder / "conf/cluster/lab.yaml").read_text())
    cluster = read_config(unbuilt_config(cluster=raw)).cluster
    assert cluster.names == ["a", "b"]
    assert [host.devices for host in cluster.hosts] == ["auto", ["cuda:0", "cpu"]]
    token = default_token_file()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(read_token(cluster, folder)) == 64
    screen = capsys.readouterr().out
    assert "hetexp train cluster=lab" in screen
    assert token.read_text().strip() not in screen + (folder / "conf/cluster/lab.yaml").read_text()


def test_it_keeps_a_token_and_a_file_that_are_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ["--host", "a=10.0.0.1", "--host", "b=10.0.0.2"]
    assert main(hosts) == 0
    before = default_token_file().read_text()
    assert main(hosts) == 2
    assert "exists already: --force" in capsys.readouterr().err
    assert main([*hosts, "--force"]) == 0
    assert default_token_file().read_text() == before


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "The input must answer five questions, but ends before. --yes takes the answers in brackets"),
        (["--host", "a"], "`--host` must be NAME=…, but is 'a' instead."),
        (["--host", "a=10.0.0.1"], "must name at least two machines"),
        (["--host", "a=10.0.0.1", "--host", "b=127.0.0.1"], "must be no loopback address"),
        (["--host", "a=1.1.1.1", "--host", "b=1.1.1.2", "--port", "0"], "`--port` must be from 1 to 65535"),
        (["--host", "a=1.1.1.1", "--host", "b=1.1.1.2", "--devices", "c=cpu"], "but names c instead"),
        (["--host", "a=1.1.1.1", "--host", "b=1.1.1.2", "--name", "none"], "`--name` must be a word"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str],
    shown: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    assert main(arguments) == 2
    assert shown in capsys.readouterr().err
    assert not (folder / "conf").exists()


def answered(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def composed(*words: str) -> dict[str, Any]:
    name_own_conf_dir(None)
    config, problems = compose_typed(words)
    assert config is not None
    assert problems == []
    return plain(config)[0]


def test_the_answers_in_brackets_compose(folder: Path) -> None:
    assert main(["--yes"]) == 0
    assert composed("experiment=mine") == composed()
    assert not (folder / "conf/cluster").exists()


def test_answers_of_ones_own_compose(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, "emulated:rtx_3090, cpu", "", "my_net.Net", "digits", "none")
    assert main(["--name", "own"]) == 0
    config = composed("experiment=own")
    assert config["model"]["_target_"] == "my_net.Net"
    assert config["hardware"]["devices"] == ["emulated:rtx_3090", "cpu"]
    assert config["logger"]["_target_"].endswith("NoLogger")


def test_several_machines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, "cpu", "a=10.0.0.1 b=10.0.0.2", "gpt", "", "csv")
    assert main(["--name", "two"]) == 0
    config = composed("experiment=two")
    assert [host["name"] for host in config["cluster"]["hosts"]] == ["a", "b"]
    assert [host["devices"] for host in config["cluster"]["hosts"]] == [None, None]
    assert config["hardware"]["devices"] == ["cpu"]
    assert config["data"]["_target_"].endswith("Text")
    assert default_token_file().exists()


def test_all_wrong_answers_are_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(monkeypatch, "nvidia_arcs", "", "resnet", "", "mlflow")
    assert main([]) == 2
    shown = capsys.readouterr().err
    for part in ("`hardware` must be one of", "`model` must be one of", "`logger` must be one of"):
        assert part in shown
    assert "my.Net" in shown
    assert not (folder / "conf").exists()
