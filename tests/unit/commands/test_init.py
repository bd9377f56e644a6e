"""`hetexp init` writes what a cluster needs, and keeps its secret secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml
from support import unbuilt_config

from hetexp.commands.init import ask, main
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
    assert "python train.py cluster=lab" in screen
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
    ("arguments", "told"),
    [
        ([], "`--host` must be given"),
        (["--host", "a"], "`--host` must be NAME=…, but is 'a' instead."),
        (["--host", "a=10.0.0.1"], "must name at least two machines"),
        (["--host", "a=10.0.0.1", "--host", "b=127.0.0.1"], "must be no loopback address"),
        (["--host", "a=1.1.1.1", "--host", "b=1.1.1.2", "--port", "0"], "`--port` must be from 1 to 65535"),
        (["--host", "a=1.1.1.1", "--host", "b=1.1.1.2", "--devices", "c=cpu"], "but names c instead"),
        (["--host", "a=1.1.1.1", "--host", "b=1.1.1.2", "--name", "none"], "`--name` must be a word"),
    ],
)
def test_what_is_wrong_is_told(
    arguments: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert told in capsys.readouterr().err
    assert not (folder / "conf").exists()


def test_it_asks_for_machines_until_there_is_no_more() -> None:
    answers = iter(["a", "10.0.0.1", "b", "10.0.0.2", ""])
    assert ask(lambda question: next(answers)) == [("a", "10.0.0.1"), ("b", "10.0.0.2")]
