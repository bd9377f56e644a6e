"""Case 51: a machine finds its role by `node`, its name or an address, and its address must be its own."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from hetexp.cluster.role import own_place, own_role, resolve
from hetexp.cluster.token import read_token
from hetexp.core.cluster import ClusterConfig, HostEntry
from hetexp.core.errors import ConfigError, SetupError

HERE = {"127.0.0.1": "lo", "10.0.0.2": "eth0", "172.17.0.1": "docker0"}


def cluster(*addresses: str, **first: Any) -> ClusterConfig:
    hosts = [HostEntry(name=name, address=one) for name, one in zip("abc", addresses, strict=False)]
    return ClusterConfig(hosts=[hosts[0].model_copy(update=first), *hosts[1:]])


def test_the_role_follows_node_then_the_name_then_an_address() -> None:
    two = cluster("10.0.0.1", "10.0.0.2")
    assert own_role(two, "a", "b", HERE).name == "a"
    assert own_role(two, None, "A.example.org", {}).name == "a"
    assert own_role(two, None, "elsewhere", HERE).name == "b"


@pytest.mark.parametrize("addresses", [("10.0.0.7", "10.0.0.8"), ("10.0.0.2", "172.17.0.1")])
def test_no_role_and_two_roles_are_told(addresses: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        own_role(cluster(*addresses), None, "elsewhere", HERE)
    (told,) = error.value.problems
    assert told.startswith("`node` must be given here, one of a, b, but is null instead.")
    assert "its addresses: 10.0.0.2, 172.17.0.1" in told
    assert ("fits none of them" in told) == (addresses[0] == "10.0.0.7")


def test_an_address_of_another_machine_is_told() -> None:
    two = cluster("10.0.0.1", "10.0.0.2")
    with pytest.raises(
        SetupError, match=r"hosts\[0\].address` must be one of this machine's \(10.0.0.2, 172"
    ):
        own_place(two.hosts[0], two, HERE)
    assert own_place(two.hosts[1], two, HERE) == ("10.0.0.2", "eth0")


def test_another_interface_than_that_of_the_address_is_told() -> None:
    two = cluster("10.0.0.2", "10.0.0.3", interface="docker0")
    with pytest.raises(SetupError, match="must be the one with 10.0.0.2, eth0, but is 'docker0' instead"):
        own_place(two.hosts[0], two, HERE)


def test_a_name_that_leads_to_the_loopback_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's installer writes it: 127.0.1.1 and the machine's own name in /etc/hosts."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    two = cluster("desktop", "10.0.0.3")
    with pytest.raises(SetupError, match="'desktop' leads to 127.0.1.1 on this one"):
        resolve(two.hosts[0], two)


def test_a_name_that_leads_nowhere_is_told() -> None:
    two = cluster("no-such-machine.invalid", "10.0.0.3")
    with pytest.raises(SetupError, match="but is 'no-such-machine.invalid' instead"):
        resolve(two.hosts[0], two)


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        (None, 0o600, "cannot be read"),
        ("a" * 64, 0o640, "must be readable by its owner only, but has mode 640"),
        ("short", 0o600, "must hold a secret of at least 32 characters, but has 5"),
    ],
)
def test_a_token_that_is_no_secret_is_refused(
    text: str | None, mode: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HETEXP_CLUSTER_TOKEN", raising=False)
    if text is not None:
        (tmp_path / "token").write_text(text)
        (tmp_path / "token").chmod(mode)
    with pytest.raises(SetupError, match=told) as error:
        read_token(ClusterConfig(token_file="token"), tmp_path)
    assert text is None or text not in str(error.value).split()


def test_the_variable_gives_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETEXP_CLUSTER_TOKEN", "b" * 40)
    assert read_token(ClusterConfig(), tmp_path) == b"b" * 40
