from __future__ import annotations

import socket
import threading

import pytest
import torch.distributed as dist
from launched import wait_for

from hetexp.core.errors import SetupError
from hetexp.core.rank_env import RankEnv
from hetexp.hosts import engine_store
from hetexp.hosts.engine_store import EngineStore


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    return number


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_store, "NOTICE_SECONDS", 0.1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def rank_env(rank: int, port: int, engine: str = "torch", address: str = "127.0.0.1") -> RankEnv:
    return RankEnv(engine, rank, 2, rank, address, port, "0", "box")


@pytest.mark.parametrize(
    ("engine", "variables"),
    [("torch", ("RANK=0", "WORLD_SIZE=2")), ("slurm", ("SLURM_PROCID=0", "SLURM_NTASKS=2"))],
)
@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1"])
def test_rank_0_says_soon_which_variables_make_it_wait(
    engine: str, variables: tuple[str, str], address: str, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second address leads nowhere, as that of another job's host may: torch prints no C++ stack."""
    store = EngineStore(rank_env(0, port, engine, address), 0.5)
    store.report("device", {})
    with pytest.raises(SetupError) as caught:
        store.gather("device")
    (line,) = capfd.readouterr().err.splitlines()
    for text in (line, str(caught.value)):
        assert all(variable in text for variable in variables)
        assert "HETEXP_ENGINE=none" in text
        assert f"{address}:{port}" in text
    assert "rank 1" in line


def test_another_rank_says_soon_which_variables_make_it_wait(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SetupError) as caught:
        EngineStore(rank_env(1, port), 0.5)
    (line,) = capfd.readouterr().err.splitlines()
    for text in (line, str(caught.value)):
        assert all(part in text for part in ("RANK=1", "WORLD_SIZE=2", "HETEXP_ENGINE=none", "rank 0"))


def test_a_port_that_is_taken_is_one_sentence_with_the_way_out(port: int) -> None:
    with socket.create_server(("", port)), pytest.raises(SetupError) as caught:
        EngineStore(rank_env(0, port), 0.5)
    assert "MASTER_PORT" in str(caught.value)
    assert "HETEXP_ENGINE=none" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_ranks_that_meet_at_once_and_compute_for_long_afterwards_say_nothing(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    first = EngineStore(rank_env(0, port), 10.0)
    second = EngineStore(rank_env(1, port), 10.0)
    for store in (first, second):
        store.report("device", {"rank": store.rank_env.rank})
        store.report("done", {}) if store is first else None
    assert first.gather("device") == [{"rank": 0}, {"rank": 1}]
    late = threading.Timer(0.3, second.report, ("done", {}))
    late.start()
    first.gather("done")
    late.join()
    assert capfd.readouterr().err == ""


def test_with_a_secret_only_rank_0_commands(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HETEXP_CLUSTER_TOKEN", "5a" * 32)
    first, second = EngineStore(rank_env(0, port), 10.0), EngineStore(rank_env(1, port), 10.0)
    intruder = dist.PrefixStore("hetexp/0", dist.TCPStore("127.0.0.1", port, is_master=False))
    intruder.set("command/0", '{"plan": "of another user"}')
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(second.next_command()))
    thread.start()
    wait_for(lambda: "`command/0` in the run's store must be signed" in caplog.text, "word of the intruder")
    assert found == []
    first.send_command({"end": None})
    thread.join(60)
    assert found == [{"end": None}]
