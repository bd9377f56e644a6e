"""Which rank of a job this process is, if an engine other than hetexp's launcher started it.

torchrun, Ray Train and other engines set torch's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. SLURM's `srun` sets variables of its own. Those of MPI are refused: they name no host where ranks
could meet. `HETEXP_ENGINE=none` ignores all of them.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hetexp.core.errors import ConfigError

ENGINE = "HETEXP_ENGINE"
"""Variable; `none` makes hetexp's own launcher start the ranks."""
OTHERWISE = f"Or set {ENGINE}=none: hetexp's own launcher starts the ranks then."
"""What to do about variables that were left behind, as the last sentence of an error."""
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)
"""Rank and number of ranks, as Open MPI, MPICH and MVAPICH set them."""
_NODE = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
"""Number of this process's node among the job's: torchrun's, Ray Train's, SLURM's."""
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
"""Number of the step of srun, in newer and older versions."""
_FIRST_PORT, _PORTS = 15000, 16000
"""Range of the ports for SLURM jobs, below the ports that systems assign by themselves."""
_IN_BRACKETS = re.compile(r"([^\[,]+)\[(\d+)[^\]]*\]([^,]*)")


@dataclass(frozen=True)
class RankEnv:
    """One process's place in a job."""

    engine: str
    """`torchrun`, `slurm`, or `torch` for any other engine that sets torch's variables, such as Ray Train."""
    rank: int
    world_size: int
    local_rank: int
    """Number among the processes of its host; the process drives the device with this number."""
    address: str
    """Address of the host of rank 0."""
    port: int
    node: str
    """Identifies its host within the job: the number of the node if the engine sets it."""
    host: str
    """Name of its host, to show."""
    attempt: str = "0"
    """Number of the job's start: torchrun starts all processes again when one has failed."""
    store_is_there: bool = False
    """Whether the engine hosts a store at that address; otherwise rank 0 does."""

    @property
    def variables(self) -> str:
        """The variables by which this process is a rank, with their values."""
        rank, size = SLURM[:2] if self.engine == "slurm" else TORCH[:2]
        return f"{rank}={self.rank} and {size}={self.world_size}"

    @property
    def leads(self) -> bool:
        """Whether this process decides for all."""
        return self.rank == 0


def find_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv | None:
    """Return this process's place in another engine's job; `None`: hetexp's launcher starts the ranks.

    Raises:
        ConfigError: variables are missing or contradict each other; names all of them in one line.
    """
    environ = os.environ if environ is None else environ
    wanted = environ.get(ENGINE, "auto")
    if wanted not in ("auto", "none"):
        raise ConfigError(f"`{ENGINE}` must be auto or none, but is '{wanted}' instead.")
    if wanted == "none":
        return None
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return _of_torch(environ)
    if environ.get("SLURM_PROCID") and environ.get("SLURM_NTASKS", "1") != "1":
        in_step = any(environ.get(name) for name in _STEP)
        if environ.get("SLURM_JOB_ID") and not in_step:  # a batch script's own
            raise ConfigError(
                f"`SLURM_PROCID` ({environ['SLURM_PROCID']}) and `SLURM_NTASKS` ({environ['SLURM_NTASKS']}) "
                "must be those of a task of srun, but `SLURM_STEP_ID` is not set: no other rank would come. "
                f"Start the ranks by srun. {_left_behind(environ, SLURM)}"
            )
        return _of_slurm(environ)
    for rank, size in _MPI:
        if environ.get(rank) and environ.get(size, "1") != "1":
            needed = ", ".join(f"`{name}`" for name in TORCH)
            raise ConfigError(
                f"Under MPI ({rank}={environ[rank]}, {size}={environ[size]}) {needed} must be set for each "
                f"process, but `RANK` is not. {OTHERWISE}"
            )
    return None


def _of_torch(environ: Mapping[str, str]) -> RankEnv:
    engine = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "torch"
    numbers = _numbers(environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"), TORCH, engine)
    return RankEnv(
        engine,
        numbers["RANK"],
        numbers["WORLD_SIZE"],
        numbers["LOCAL_RANK"],
        environ["MASTER_ADDR"],
        numbers["MASTER_PORT"],
        _node(environ),
        platform.node(),
        environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _of_slurm(environ: Mapping[str, str]) -> RankEnv:
    numbers = _numbers(environ, SLURM, SLURM, "slurm")
    address = environ.get("MASTER_ADDR") or _first_node(environ) or environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise ConfigError(
            "Started by SLURM, `SLURM_NODELIST` or `MASTER_ADDR` must be set, but neither is: rank 0's host "
            f"is not known. {OTHERWISE}"
        )
    job, step = (environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    offset = 7 * int(job) + int(step) if job.isdigit() and step.isdigit() else 0
    port = environ.get("MASTER_PORT") or str(_FIRST_PORT + offset % _PORTS)
    if not port.isdigit():
        raise ConfigError(f"`MASTER_PORT` must be a port, but is '{port}' instead.")
    return RankEnv(
        "slurm",
        numbers["SLURM_PROCID"],
        numbers["SLURM_NTASKS"],
        numbers["SLURM_LOCALID"],
        address,
        int(port),
        _node(environ),
        environ.get("SLURMD_NODENAME") or platform.node(),
        environ.get("SLURM_RESTART_COUNT", "0"),
    )


def _numbers(
    environ: Mapping[str, str], names: tuple[str, ...], needed: tuple[str, ...], engine: str
) -> dict[str, int]:
    """Return the variables that must be whole numbers.

    Args:
        names: of these variables; the first three are the rank, the number of ranks, and the rank on this
            host.
        needed: variables that must be set.
    """
    who = {"slurm": "SLURM", "torch": "an engine that sets RANK or WORLD_SIZE"}.get(engine, engine)
    absent = [name for name in needed if not environ.get(name)]
    problems = [f"`{name}` must be set, but is not" for name in absent]
    numbers = {}
    for name in names:
        text = environ.get(name, "")
        if name in absent:
            continue
        if text.isascii() and text.isdigit():
            numbers[name] = int(text)
        else:
            problems.append(f"`{name}` must be a whole number of at least 0, but is '{text}' instead")
    rank, size, local = (numbers.get(name) for name in names[:3])
    if size is not None and size < 1:
        problems.append(f"`{names[1]}` must be at least 1, but is {size} instead")
    elif size is not None:
        problems += [
            f"`{name}` must be below `{names[1]}` ({size}), but is {value} instead"
            for name, value in ((names[0], rank), (names[2], local))
            if value is not None and value >= size
        ]
    if problems:
        raise ConfigError(f"Started by {who}, {'; '.join(problems)}. {_left_behind(environ, needed)}")
    return numbers


def _left_behind(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Say what to do about variables of an earlier job in the same shell."""
    present = " ".join(name for name in names if environ.get(name))
    return f"If another job left them behind, run: unset {present}. {OTHERWISE}"


def _node(environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in _NODE if environ.get(name)), platform.node())


def _first_node(environ: Mapping[str, str]) -> str | None:
    """Return the first name of SLURM's compressed list: `gpu[03-05,9],x1` begins with `gpu03`."""
    nodes = next((environ[name] for name in _NODE_LISTS if environ.get(name)), None)
    if nodes is None:
        return None
    if (match := _IN_BRACKETS.match(nodes)) is not None:
        return "".join(match.groups())
    return nodes.partition(",")[0]
