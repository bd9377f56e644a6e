"""Case 51: a machine finds its role by `node`, its name or an address, and its address must be its own."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from hetexp.core.cluster import ClusterConfig, HostEntry
from hetexp.core.errors import ConfigError, SetupError
from hetexp.hosts.this_host import resolve, this_address, this_host
from hetexp.hosts.token import read_token

HERE = {"127.0.0.1": "lo", "10.0.0.2": "eth0", "172.17.0.1": "docker0"}


def cluster(*addresses: str, **first: Any) -> ClusterConfig:
    hosts = [HostEntry(name=name, address=one) for name, one in zip("abc", addresses, strict=False)]
    return ClusterConfig(hosts=[hosts[0].model_copy(update=first), *hosts[1:]])


def test_the_role_follows_node_then_the_name_then_an_address() -> None:
    two = cluster("10.0.0.1", "10.0.0.2")
    assert this_host(two, "a", "b", HERE).name == "a"
    assert this_host(two, None, "A.example.org", {}).name == "a"
    assert this_host(two, None, "elsewhere", HERE).name == "b"


@pytest.mark.parametrize("addresses", [("10.0.0.7", "10.0.0.8"), ("10.0.0.2", "172.17.0.1")])
def test_no_role_and_two_roles_are_reported(addresses: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        this_host(cluster(*addresses), None, "elsewhere", HERE)
    (problem,) = error.value.problems
    assert problem.startswith("`node` must be given here, one of a, b, but is null instead.")
    assert "its addresses: 10.0.0.2, 172.17.0.1" in problem
    assert ("fits none of them" in problem) == (addresses[0] == "10.0.0.7")


def test_an_address_of_another_machine_is_reported() -> None:
    two = cluster("10.0.0.1", "10.0.0.2")
    with pytest.raises(
        SetupError, match=r"hosts\[0\].address` must be one of this machine's \(10.0.0.2, 172"
    ):
        this_address(two.hosts[0], two, HERE)
    assert this_address(two.hosts[1], two, HERE) == ("10.0.0.2", "eth0")


def test_another_interface_than_that_of_the_address_is_reported() -> None:
    two = cluster("10.0.0.2", "10.0.0.3", interface="docker0")
    with pytest.raises(SetupError, match="must be the one with 10.0.0.2, eth0, but is 'docker0' instead"):
        this_address(two.hosts[0], two, HERE)


def test_a_name_that_leads_to_the_loopback_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's installer writes it: 127.0.1.1 and the machine's own name in /etc/hosts."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    two = cluster("desktop", "10.0.0.3")
    with pytest.raises(SetupError, match="'desktop' leads to 127.0.1.1 on this one"):
        resolve(two.hosts[0], two)


def test_a_name_that_leads_nowhere_is_reported() -> None:
    two = cluster("no-such-machine.invalid", "10.0.0.3")
    with pytest.raises(SetupError, match="but is 'no-such-machine.invalid' instead"):
        resolve(two.hosts[0], two)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0o600, "cannot be read"),
        ("a" * 64, 0o640, "must be readable by its owner only, but has mode 640"),
        ("short", 0o600, "must hold a secret of at least 32 characters, but has 5"),
    ],
)
def test_a_token_that_is_no_secret_is_refused(
    text: str | None, mode: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HETEXP_CLUSTER_TOKEN", raising=False)
    if text is not None:
        (tmp_path / "token").write_text(text)
        (tmp_path / "token").chmod(mode)
    with pytest.raises(SetupError, match=message) as error:
        read_token(ClusterConfig(token_file="token"), tmp_path)
    assert text is None or text not in str(error.value).split()


def test_the_variable_gives_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETEXP_CLUSTER_TOKEN", "b" * 40)
    assert read_token(ClusterConfig(), tmp_path) == b"b" * 40
