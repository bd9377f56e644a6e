"""S14: the same command on several machines trains one model across them; here on loopback addresses."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from machines import Cluster, Machine, until
from safetensors.torch import load_file
from support import Train, difference

pytestmark = pytest.mark.timeout(400)  # two or three launchers at once, each of which starts like a command

EXACT = (
    "trainer.max_steps=8",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=24",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=4",
)
LONG = (
    "trainer.max_steps=100000",
    "trainer.max_epochs=null",
    "trainer.log_every=5",
    "comm.timeout_seconds=30",
)
Start = Callable[..., Cluster]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Start]:
    made: list[Cluster] = []

    def make(devices: list[str], *overrides: str) -> Cluster:
        folder = tmp_path / f"cluster_{len(made)}"
        folder.mkdir()
        made.append(Cluster(folder, devices, *overrides))
        return made[-1]

    yield make
    for one in made:
        one.end()


def ranks_of(machine: Machine) -> list[psutil.Process]:
    """Return the processes that a machine's launcher has started, now."""
    found: list[psutil.Process] = psutil.Process(machine.process.pid).children(recursive=True)
    return found


def test_two_machines_train_as_one_device(cluster: Start, train: Train, tmp_path: Path) -> None:
    """Case 51: 2 + 1 ranks; shared memory on the one machine, gloo between the two."""
    both = cluster(["[{device: cpu, count: 2}]", "[cpu]"], *EXACT)
    member = both.start("b")
    until(lambda: "waits for a at 127.0.0.2" in member.screen, [member])
    leader = both.start("a")
    assert (leader.wait(), member.wait()) == (0, 0), leader.screen + member.screen
    alone = train("hardware=cpu", "strategy=single", "data=synthetic", "model=mlp", *EXACT)
    for step in (4, 8):
        saved = load_file(leader.run_dir / "checkpoints" / f"step_{step:08d}" / "model.safetensors")
        assert difference(saved, alone.parameters(step)) <= 1e-12
    summary = leader.summary
    assert summary["status"] == "completed"
    assert [device["id"] for device in summary["devices"]] == ["cpu:0@a", "cpu:1@a", "cpu:0@b"]
    assert summary["comm"]["backend"] == "shm + gloo"
    assert "The network between the hosts has" in leader.screen
    assert (leader.run_dir / "logs" / "rank_2.log").is_file()  # of the other machine
    assert not (member.run_dir / "member").exists()  # and nothing of it there
    secret = both.token_file.read_text()
    written = [path for path in both.folder.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not any(secret.encode() in path.read_bytes() for path in written if path != both.token_file)


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_machines_go_on_from_a_checkpoint_of_the_leaders(strategy: str, cluster: Start, train: Train) -> None:
    """Only the leader has it; the other machine's ranks get a copy."""
    words = (*EXACT, f"strategy={strategy}")
    first = cluster(["[cpu]", "[cpu]"], *words, "trainer.max_steps=4")
    leader, member = first.start("a"), first.start("b")
    assert (leader.wait(), member.wait()) == (0, 0), leader.screen + member.screen
    second = cluster(["[cpu]", "[cpu]"], *words, f"resume={leader.run_dir}/step:4")
    again, member = second.start("a"), second.start("b")
    assert (again.wait(), member.wait()) == (0, 0), again.screen + member.screen
    assert "resume: goes on from" in again.screen
    alone = train("hardware=cpu", "strategy=single", "data=synthetic", "model=mlp", *EXACT)
    saved = load_file(again.run_dir / "checkpoints" / "step_00000008" / "model.safetensors")
    assert difference(saved, alone.parameters(8)) <= 1e-12
    assert not (member.run_dir / "member").exists()
    none = cluster(["[cpu]", "[cpu]"], *words, f"resume={leader.run_dir}/step:3")
    refused = none.start("a")
    assert refused.wait() == 2  # before anybody is waited for
    assert "`resume` must be the step of a checkpoint in" in refused.screen
    assert "(4), but is 'step:3' instead" in refused.screen.replace("\n", " ")


PIPELINE = (
    *("strategy=pipeline", "trainer.max_steps=16", "fault.min_devices=2", "fault.respawn_seconds=0.1"),
    "comm.timeout_seconds=30",
)
"""Both devices are needed: a pipeline that may would go on with the stages cut for the rest."""


def test_a_pipeline_starts_again_with_a_rank_of_another_machine(cluster: Start, train: Train) -> None:
    """From the last step whose checkpoint has the parts of all stages, as if nothing had happened."""
    fault = "fault.events=[{kind: death, device: 'cpu:0@b', at_step: 10}]"
    both = cluster(["[cpu]", "[cpu]"], *EXACT, *PIPELINE, fault)
    leader, member = both.start("a"), both.start("b")
    assert (leader.wait(), member.wait()) == (0, 0), leader.screen + member.screen
    assert "start again from step 8" in leader.screen
    assert [failure["kind"] for failure in leader.summary["failures"]] == ["SIGKILL"]
    as_alone(leader, train)


def test_a_pipeline_waits_for_a_machine_that_was_lost(cluster: Start, train: Train) -> None:
    # However fast this machine is, the run is not at its end when `b` is lost: it stands still after step 8.
    stall = "fault.events=[{kind: stall, device: 'cpu:0@b', at_step: 8, seconds: 8}]"
    both = cluster(["[cpu]", "[cpu]"], *EXACT, *PIPELINE, stall, "fault.heartbeat_seconds=100")
    leader, lost = both.start("a"), both.start("b")
    until(lambda: leader.steps() >= 8, [leader, lost])
    lost.process.kill()
    lost.wait()
    until(lambda: "a waits for b (127.0.0.3) to join again" in leader.screen, [leader])
    back = both.start("b")
    assert (leader.wait(), back.wait()) == (0, 0), leader.screen + back.screen
    assert "b (127.0.0.3) has joined again." in leader.screen
    assert {failure["kind"] for failure in leader.summary["failures"]} == {"HostLost"}
    as_alone(leader, train)


def as_alone(leader: Machine, train: Train) -> None:
    words = (*EXACT, "trainer.max_steps=16")
    alone = train("hardware=cpu", "strategy=single", "data=synthetic", "model=mlp", *words)
    saved = load_file(leader.run_dir / "checkpoints" / "step_00000016" / "model.safetensors")
    assert difference(saved, alone.parameters(16)) <= 1e-12


def test_a_machine_that_is_lost_is_done_without(cluster: Start) -> None:
    three = cluster(["[cpu]", "[{device: cpu, count: 2}]", "[cpu]"], *LONG, "fault.respawn=0")
    leader, lost, other = (three.start(name) for name in "abc")
    machines = [leader, lost, other]
    until(lambda: leader.steps() >= 10, machines)
    gone = ranks_of(lost)
    lost.process.kill()
    lost.wait()
    until(lambda: "2 devices go on" in leader.screen, [leader, other])
    _, alive = psutil.wait_procs(gone, timeout=10)
    assert not alive
    assert "b (127.0.0.3) closed its connection" in leader.screen
    assert "was lost at step" in leader.screen
    at = leader.steps()
    until(lambda: leader.steps() > at + 10, [leader, other])
    leader.process.terminate()  # the run saves a checkpoint and ends
    assert leader.wait() == 143
    assert other.wait() == 1
    assert "Stopped by SIGTERM" in leader.screen
    kinds = {failure["kind"] for failure in leader.summary["failures"]}
    assert kinds == {"HostLost"}
    assert leader.summary["checkpoint"] is not None


def test_a_rank_of_another_machine_comes_back(cluster: Start) -> None:
    fault = "fault.events=[{kind: death, device: 'cpu:0@b', at_step: 12}]"
    both = cluster(["[cpu]", "[cpu]"], *LONG, fault, "fault.respawn_seconds=0.1")
    leader, member = both.start("a"), both.start("b")
    until(lambda: "takes part from step" in leader.screen, [leader, member])
    assert "cpu:0@b was lost at step" in leader.screen
    leader.process.terminate()
    assert (leader.wait(), member.wait()) == (143, 1)
    assert [failure["kind"] for failure in leader.summary["failures"]] == ["SIGKILL"]


def test_without_the_leader_a_machine_ends_its_ranks(cluster: Start) -> None:
    both = cluster(["[cpu]", "[cpu]"], *LONG)
    leader, member = both.start("a"), both.start("b")
    until(lambda: leader.steps() >= 10, [leader, member])
    ranks = ranks_of(member)
    assert ranks
    leader.process.kill()
    assert member.wait(20) == 1
    # Which end of the connection notices first decides whether the system has a reason to give.
    assert re.search(r"\ba closed its connection( \(.+\))?: this machine's ranks were ended\.", member.screen)
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


def test_where_only_other_machines_are_left_the_run_ends_and_says_so(cluster: Start) -> None:
    fault = "fault.events=[{kind: death, device: 'cpu:0@a', at_step: 12}]"
    both = cluster(["[cpu]", "[cpu]"], *LONG, fault, "fault.respawn=0", "trainer.checkpoint_every=5")
    leader, member = both.start("a"), both.start("b")
    assert leader.wait() != 0
    assert "No device of this machine, where the run's folder is, is left." in leader.screen
    assert member.wait(20) == 1
    assert "a: " in member.screen
    assert leader.summary["checkpoint"] is not None


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_sweep_is_refused_before_anybody_is_waited_for(name: str, cluster: Start, tmp_path: Path) -> None:
    both = cluster(["[cpu]", "[cpu]"])
    sweep = tmp_path / "sweep"
    machine = both.start(name, "hydra.mode=MULTIRUN", f"hydra.sweep.dir={sweep}", "trainer.seed=0,1")
    assert machine.wait() == 1
    for job in "01":
        told = (sweep / job / "error.txt").read_text(encoding="utf-8")
        assert "`cluster.hosts` must be empty in a sweep (-m). Start its jobs one by one" in told
        assert not (sweep / job / "plan.json").exists()
    assert "waits for" not in machine.screen


def test_strangers_at_the_port_leave_a_training_unharmed(cluster: Start) -> None:
    """Case 52, in a training."""
    both = cluster(["[cpu]", "[cpu]"], *LONG)
    leader, member = both.start("a"), both.start("b")
    until(lambda: leader.steps() >= 5, [leader, member])
    for number in range(100):
        with socket.create_connection((both.addresses[0], both.port), timeout=5) as stranger:
            stranger.sendall(struct.pack(">I", 2**32 - 1) if number % 2 else os.urandom(50))
    at = leader.steps()
    until(lambda: leader.steps() > at + 10, [leader, member])
    with pytest.raises(ConnectionRefusedError):  # the port is open at the named address only
        socket.create_connection(("127.0.0.9", both.port), timeout=5)
    leader.process.terminate()
    assert (leader.wait(), member.wait()) == (143, 1)
    assert leader.summary["failures"] == []
    assert (leader.run_dir / "cluster.log").read_text().count("refused 127.0.0.1") >= 50
