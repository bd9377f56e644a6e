from __future__ import annotations

import pytest

from hetexp.core.errors import ConfigError
from hetexp.core.rank_env import find_rank_env

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "gpu[03-05,9]-ib,x1",
}


def test_no_engine() -> None:
    assert find_rank_env({}) is None
    assert find_rank_env({"MASTER_ADDR": "10.0.0.1"}) is None


def test_torchrun() -> None:
    more = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "1"}
    seat = find_rank_env(TORCH | more | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert seat is not None
    assert (seat.engine, seat.rank, seat.world_size, seat.local_rank) == ("torchrun", 3, 4, 1)
    assert (seat.address, seat.port, seat.node, seat.attempt) == ("10.0.0.1", 29500, "1", "2")
    assert seat.store_is_there
    assert not seat.leads


def test_torchs_variables_of_another_engine() -> None:
    seat = find_rank_env(TORCH | {"RANK": "0", "NODE_RANK": "0"})
    assert seat is not None
    assert (seat.engine, seat.node, seat.store_is_there, seat.leads) == ("torch", "0", False, True)


def test_slurm() -> None:
    job = {"SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    one, other = (
        find_rank_env(SLURM | job),
        find_rank_env(SLURM | job | {"SLURM_PROCID": "3", "SLURM_LOCALID": "0"}),
    )
    assert one is not None
    assert other is not None
    assert (one.engine, one.rank, one.world_size, one.local_rank) == ("slurm", 1, 4, 1)
    assert one.address == other.address == "gpu03-ib"
    assert one.port == other.port
    assert 15000 <= one.port < 31000


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n1,n2", "n1"), ("n[7,9]", "n7"), ("a-[001-004]", "a-001")]
)
def test_first_node_of_slurm(nodes: str, first: str) -> None:
    seat = find_rank_env(SLURM | {"SLURM_NODELIST": nodes})
    assert seat is not None
    assert seat.address == first


def test_address_of_slurm_where_no_nodes_are_listed() -> None:
    without = {name: value for name, value in SLURM.items() if name != "SLURM_NODELIST"}
    seat = find_rank_env(without | {"SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1", "MASTER_PORT": "4000"})
    assert seat is not None
    assert (seat.address, seat.port) == ("10.1.1.1", 4000)
    with pytest.raises(ConfigError, match="`SLURM_NODELIST` or `MASTER_ADDR` must be set"):
        find_rank_env(without)


def test_one_task_of_slurm_is_for_the_launcher() -> None:
    assert find_rank_env(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


def test_torchrun_within_slurm() -> None:
    seat = find_rank_env(SLURM | TORCH)
    assert seat is not None
    assert seat.engine == "torch"


def test_launcher_all_the_same() -> None:
    assert find_rank_env(TORCH | {"HETEXP_ENGINE": "none"}) is None
    with pytest.raises(ConfigError, match="must be auto or none, but is 'ray'"):
        find_rank_env({"HETEXP_ENGINE": "ray"})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"MASTER_ADDR": ""}, "`MASTER_ADDR` must be set"),
        ({"LOCAL_RANK": ""}, "`LOCAL_RANK` must be set"),
        ({"RANK": "-1"}, "`RANK` must be a whole number of at least 0, but is '-1'"),
        ({"RANK": "4"}, r"`RANK` must be below `WORLD_SIZE` \(4\), but is 4"),
        ({"LOCAL_RANK": "9"}, r"`LOCAL_RANK` must be below `WORLD_SIZE` \(4\), but is 9"),
        ({"WORLD_SIZE": "0"}, "`WORLD_SIZE` must be at least 1"),
        ({"MASTER_PORT": "http"}, "`MASTER_PORT` must be a whole number"),
    ],
)
def test_wrong_variables_are_one_line(changes: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        find_rank_env(TORCH | changes)
    assert len(str(caught.value).splitlines()) == 1
    assert "HETEXP_ENGINE=none" in str(caught.value)


def test_all_that_is_wrong_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        find_rank_env({"RANK": "x"})
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert f"`{name}`" in str(caught.value)


@pytest.mark.parametrize(
    "names", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]
)
def test_mpi_is_refused_instead_of_a_training_in_each_process(names: tuple[str, str]) -> None:
    variables = dict(zip(names, ("1", "2"), strict=True))
    with pytest.raises(ConfigError, match="HETEXP_ENGINE=none") as caught:
        find_rank_env(variables)
    assert f"{names[1]}=2" in str(caught.value)
    assert find_rank_env(variables | {names[1]: "1"}) is None
    assert find_rank_env(variables | {"HETEXP_ENGINE": "none"}) is None
    seat = find_rank_env(variables | TORCH)
    assert seat is not None
    assert seat.variables == "RANK=3 and WORLD_SIZE=4"
    seat = find_rank_env(variables | SLURM)
    assert seat is not None
    assert seat.variables == "SLURM_PROCID=1 and SLURM_NTASKS=4"


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "unset RANK WORLD_SIZE"),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "unset WORLD_SIZE LOCAL_RANK"),
        (SLURM | {"SLURM_JOB_ID": "7"}, "unset SLURM_PROCID SLURM_NTASKS SLURM_LOCALID"),
    ],
)
def test_variables_of_an_earlier_job(left: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        find_rank_env(left)
    assert "HETEXP_ENGINE=none" in str(caught.value)


def test_a_shell_of_slurm_is_no_rank() -> None:
    """As `salloc` opens one."""
    assert find_rank_env({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NODELIST": "a"}) is None
