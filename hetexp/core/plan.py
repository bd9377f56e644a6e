"""The plan of a run, which the launcher writes once and every rank reads."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.core.cost.step import Wire
from hetexp.core.device import DeviceSpec
from hetexp.core.files import read_json, write_json
from hetexp.core.split import apportion
from hetexp.core.stage import Stage
from hetexp.core.topology import Topology

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_TUPLES = (
    "shares",
    "local_batch_sizes",
    "threads",
    "overrides",
    "precisions",
    "microbatch_sizes",
    "memory_bytes",
    "card_shares",
    "replica_batch_sizes",
    "reasons",
    "import_paths",
    "script_arguments",
)
"""Fields that JSON turns into lists."""
_SECTIONS = ("trainer", "hardware", "strategy", "balancing", "fault", "comm", "model", "data", "optimizer")
_BY_RANK = ("devices", "threads", "precisions", "memory_bytes")
"""Fields with a value for each rank that does not depend on other ranks."""


@dataclass(frozen=True)
class Plan:
    """Chosen devices, their shares and the resolved configuration, with the reasons."""

    run_id: str
    run_dir: str
    """Absolute path of the run folder."""
    name: str
    """Name to show."""
    group: str | None
    """The sweep that the run belongs to."""
    config: dict[str, Any]
    """The resolved configuration as plain types (`hetexp.core.config.Config` reads it)."""
    devices: tuple[DeviceSpec, ...]
    """Device of each rank."""
    strategy: str
    shares: tuple[float, ...]
    """Each rank's fraction of a global batch; they sum to 1."""
    local_batch_sizes: tuple[int, ...]
    """Each rank's samples of a full global batch."""
    collective_backend: str
    """Backend of the process group for counts and decisions of all ranks: `gloo`, `nccl` or `xccl`."""
    threads: tuple[int, ...]
    """CPU threads of each rank's torch."""
    choices: dict[str, str] = field(default_factory=dict)
    """Hydra group → its option, for names and tags."""
    overrides: tuple[str, ...] = ()
    """The typed overrides, for the run's name."""
    route: Topology | None = None
    """How gradients, or weights, are summed over all ranks; `None`: by the process group of all ranks."""
    aborts: bool = False
    """Whether an abort ends a collective of the vendors' libraries that waits for a lost rank, for all
    libraries that join these devices."""
    route_fallback: dict[str, str] | None = None
    """`from` and `to` which route, and the `reason`, if the planned route failed the self-test at the start.
    Ranks set it; it is not in the plan's file."""
    precisions: tuple[str, ...] = ()
    """Precision of each rank's computation: `float32`, `bfloat16`, `float16` or `float64`."""
    microbatch_sizes: tuple[int | None, ...] = ()
    """Each rank's largest microbatch that fits its memory; `None`: its whole local batch."""
    memory_bytes: tuple[int | None, ...] = ()
    """Each rank's estimated memory; `None`: not known."""
    stages: tuple[tuple[Stage, ...], ...] = ()
    """Each rank's stages of a pipeline; empty for other strategies."""
    cards: tuple[DeviceSpec, ...] = ()
    """All devices of a single rank that drives several (`devices` has the first); else empty."""
    card_shares: tuple[float, ...] = ()
    """Fraction of each batch for each of these devices."""
    replica_batch_sizes: tuple[int, ...] = ()
    """Samples of a full global batch for each pipeline; empty for other strategies."""
    predicted_step_seconds: float | None = None
    """Predicted step of a pipeline, in the devices' own time; `None`: not known."""
    left_out: tuple[DeviceSpec, ...] = ()
    """Chosen devices that take no part, because a step is as short or shorter without them."""
    reasons: tuple[str, ...] = ()
    """Reasons for the plan, as sentences."""
    headline: str = ""
    """Which devices train, and how fast beside the fastest one alone; empty if nothing was measured."""
    exact: bool = True
    """Whether each step is the one that a single device would take with the global batch."""
    fallback: dict[str, str] | None = None
    """`from` and `to` which strategy, and the `reason`, if the configured strategy cannot run."""
    measuring: bool = False
    """Whether the ranks only measure their devices (`hetexp.training.measuring.calibrate`)."""
    calibration: dict[str, Any] | None = None
    """Measurements of these devices, and the step that they predict."""
    network: dict[str, Any] | None = None
    """Figures of the link between hosts, if there are several."""
    script: str | None = None
    """Absolute path of a user's own script that each rank runs instead of hetexp's training."""
    script_arguments: tuple[str, ...] = ()
    """Arguments of the script."""
    store_host: str = "127.0.0.1"
    store_port: int = 0
    working_dir: str = ""
    """The user's folder, from which relative paths of the configuration start."""
    import_paths: tuple[str, ...] = ()
    """Folders of the user's own modules, which ranks append to `sys.path`."""

    @property
    def all_devices(self) -> tuple[DeviceSpec, ...]:
        """Every device that takes part: one for each rank, or all devices of a single rank."""
        return self.cards or self.devices

    @property
    def card_batch_sizes(self) -> tuple[int, ...]:
        """Samples of a full global batch for each device in `cards`."""
        return apportion(sum(self.local_batch_sizes), self.card_shares).counts if self.cards else ()

    def of_ranks(self, ranks: Sequence[int], reasons: Sequence[str] = (), **changes: Any) -> Plan:
        """Return the plan of some of its ranks' devices, in this order.

        Args:
            reasons: put before the others; the reason for the old split is removed.
            changes: other values of fields.
        """

        def kept(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[rank] for rank in ranks) if values else ()

        by_rank = {name: kept(getattr(self, name)) for name in _BY_RANK}
        old = [reason for reason in self.reasons if not reason.startswith("Policy ")]
        return replace(self, **{**by_rank, "reasons": (*reasons, *old), **changes})

    def rank_of(self, place: int) -> int:
        """Return the rank that drives one of `all_devices`."""
        return 0 if self.cards else place

    def devices_of(self, rank: int) -> tuple[DeviceSpec, ...]:
        """Return the devices that a rank drives."""
        return self.cards or (self.devices[rank],)

    def share_of(self, place: int) -> float:
        """Return the fraction of each global batch that one of `all_devices` takes."""
        return (self.card_shares or self.shares)[place]

    def batch_size_of(self, place: int) -> int:
        """Return the samples of a full global batch that one of `all_devices` takes."""
        return (self.card_batch_sizes or self.local_batch_sizes)[place]

    def precision_of(self, place: int) -> str | None:
        """Return the precision of one of `all_devices`; `None` if the plan does not have it."""
        return self.precisions[self.rank_of(place)] if self.precisions else None

    def pass_size_of(self, place: int) -> int | None:
        """Return the largest microbatch of one of `all_devices`.

        `None` means that there is no limit, or that a rank divides its microbatches among several devices.
        """
        return None if self.cards else self.microbatch_size(place)

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def way(self) -> Topology:
        """How a large tensor is summed over all ranks."""
        return self.route or Topology.flat(self.collective_backend, self.world_size)

    @property
    def reforms(self) -> bool:
        """Whether ranks can leave their group and form another.

        A collective of gloo or shared memory fails if a rank is lost. One of a vendor's library waits for
        ever, and must be aborted.
        """
        libraries = self.way.libraries | {self.collective_backend}
        return self.aborts or libraries <= {"gloo", "shm"}

    @property
    def boundary_wire(self) -> Wire:
        """Type of activations and their gradients between stages: `comm.boundary_wire`."""
        wire: Wire = self.config.get("comm", {}).get("boundary_wire", "float32")
        return wire

    @property
    def wire(self) -> str:
        """Type of gradients between ranks that no vendor's library connects: `comm.wire`."""
        wire: str = self.config.get("comm", {}).get("wire", "float32")
        return wire

    @property
    def emulated(self) -> bool:
        """Whether devices are emulated or altered, or faults injected: its numbers are not the hardware's."""
        events = self.config.get("fault", {}).get("events")
        return bool(events) or any(device.emulated for device in self.devices)

    @property
    def paced(self) -> bool:
        """Whether a device is emulated, so that links are paced as well."""
        return any(device.backend == "emulated" for device in self.devices)

    def microbatch_size(self, rank: int) -> int | None:
        """Return a rank's largest microbatch: the configured size, else the one that fits its memory."""
        size: int | None = self.config["trainer"].get("microbatch_size")
        return size if size is not None or not self.microbatch_sizes else self.microbatch_sizes[rank]

    @property
    def config_hash(self) -> str:
        """Short hash of the configuration, which ranks compare before training.

        It leaves out `resume`, because the path of the checkpoint differs between machines.
        """
        text = json.dumps({**self.config, "resume": None}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def write(self, path: Path, durable: bool = True) -> None:
        """Write the plan as JSON, whole or not at all; see `write_bytes` in `hetexp.core.files`."""
        write_json(path, self.to_dict(), durable)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain types."""
        return asdict(self) | {"world_size": self.world_size, "emulated": self.emulated}

    def to_json(self) -> str:
        """Return the plan as one line of JSON."""
        return json.dumps(self.to_dict())

    def placed_as(self, own: Plan) -> Plan:
        """Return the plan with the folders and the store's address of another plan.

        Args:
            own: the plan on this machine.
        """
        return replace(
            self,
            run_dir=own.run_dir,
            working_dir=own.working_dir,
            import_paths=own.import_paths,
            store_host=own.store_host,
            store_port=own.store_port,
        )

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read the plan from a file of `write`."""
        return cls.from_json(path.read_text(encoding="utf-8"))

    @classmethod
    def read_checked(cls, path: Path) -> Plan:
        """Read the plan from a file that anyone may have written.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no plan, in one sentence.
        """
        from pydantic import ValidationError

        from hetexp.core.section import first_problem

        raw = read_json(path)
        try:
            _form().validate_python(raw)
            plan = cls.from_dict(raw)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from None
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        if problem := plan._mismatch():
            raise ValueError(problem)
        return plan

    def _mismatch(self) -> str:
        """Return which values do not belong together; empty if none."""
        ranks = len(self.devices)
        lengths = {name: len(getattr(self, name)) for name in ("shares", "local_batch_sizes", "threads")}
        optional = ("precisions", "microbatch_sizes", "memory_bytes", "stages")
        lengths |= {name: len(getattr(self, name)) for name in optional if getattr(self, name)}
        if not ranks or any(length != ranks for length in lengths.values()):
            return f"its {ranks} devices do not have one value each of {', '.join(lengths)}"
        if len(self.card_shares) != len(self.cards):
            return "its cards do not have one share each"
        odd = [name for name in _SECTIONS if type(self.config.get(name, {})) is not dict]
        return f"`config.{odd[0]}` is no section" if odd else ""

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read the plan from the result of `to_json`."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Plan:
        """Return the plan from the result of `to_dict`, after JSON."""
        raw = dict(raw)
        raw.pop("world_size")
        raw.pop("emulated")
        raw["devices"] = tuple(DeviceSpec.from_dict(device) for device in raw["devices"])
        raw["cards"] = tuple(DeviceSpec.from_dict(device) for device in raw["cards"])
        raw["left_out"] = tuple(DeviceSpec.from_dict(device) for device in raw.get("left_out", ()))
        raw["stages"] = tuple(tuple(Stage(**stage) for stage in stages) for stages in raw["stages"])
        if raw.get("route") is not None:
            raw["route"] = Topology.from_dict(raw["route"])
        for name in _TUPLES:
            raw[name] = tuple(raw[name])
        return cls(**raw)


@functools.cache
def _form() -> TypeAdapter[Plan]:
    """Return what checks the types of a plan's values."""
    from pydantic import TypeAdapter

    return TypeAdapter(Plan)
