"""The plan: everything a worker needs to know, resolved once, written once, read by every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hetexp.core.cost.step import Wire
from hetexp.core.device import DeviceSpec
from hetexp.core.files import write_json
from hetexp.core.split import apportion
from hetexp.core.stage import Stage
from hetexp.core.topology import Topology

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
_BY_RANK = ("devices", "threads", "precisions", "memory_bytes")
"""Fields with a value a rank that other ranks do not change."""


@dataclass(frozen=True)
class Plan:
    """Chosen devices, their shares and the resolved configuration, with the reasons."""

    run_id: str
    run_dir: str
    """Absolute path of the run folder."""
    name: str
    """Name for people."""
    group: str | None
    """The sweep that the run belongs to."""
    config: dict[str, Any]
    """The resolved configuration as plain types (`hetexp.core.config.Config` reads it)."""
    devices: tuple[DeviceSpec, ...]
    """One a rank, in rank order."""
    strategy: str
    shares: tuple[float, ...]
    """Fraction of each global batch a rank takes; sums to 1."""
    local_batch_sizes: tuple[int, ...]
    """The shares of a full global batch in samples."""
    collective_backend: str
    """Of the process group of all ranks, which counts and decisions go through: `gloo`, `nccl` or `xccl`."""
    threads: tuple[int, ...]
    """CPU threads a rank's torch may use."""
    choices: dict[str, str] = field(default_factory=dict)
    """Which option of each Hydra group made this plan, for names and tags."""
    overrides: tuple[str, ...] = ()
    """What the person typed, for the run's name."""
    route: Topology | None = None
    """How gradients, or weights, are summed over all ranks; `None`: by the process group of all ranks."""
    route_fallback: dict[str, str] | None = None
    """`from` and `to` which route, and the `reason`, where the start-up self-test found the planned one to
    fail; ranks know it, the plan's file does not."""
    precisions: tuple[str, ...] = ()
    """What each rank computes in: `float32`, `bfloat16`, `float16` or `float64`."""
    microbatch_sizes: tuple[int | None, ...] = ()
    """Most samples of one pass of each rank, chosen for its memory; `None`: its local batch in one pass."""
    memory_bytes: tuple[int | None, ...] = ()
    """What each rank is estimated to need of its device, `None` where that is not known."""
    stages: tuple[tuple[Stage, ...], ...] = ()
    """Each rank's pieces of the model, where the strategy cuts it; empty elsewhere."""
    cards: tuple[DeviceSpec, ...] = ()
    """All devices of the only rank, where it drives several (`devices` has the first); empty elsewhere."""
    card_shares: tuple[float, ...] = ()
    """Fraction of each batch that each of them takes."""
    replica_batch_sizes: tuple[int, ...] = ()
    """Samples of a full global batch that each pipeline takes, where the strategy cuts the model."""
    predicted_step_seconds: float | None = None
    """What a step of these stages is predicted to take, in the devices' own time; `None` where it is not."""
    left_out: tuple[DeviceSpec, ...] = ()
    """Devices that were chosen and take no part, as a step is as short or shorter without them."""
    reasons: tuple[str, ...] = ()
    """Why it looks like this, one sentence each."""
    exact: bool = True
    """Whether each step is the one that a single device would take with the global batch."""
    fallback: dict[str, str] | None = None
    """`from` and `to` which strategy, and the `reason`, where the configured one could not run."""
    measuring: bool = False
    """Whether the ranks only measure their devices (`hetexp.training.measuring.calibrate`)."""
    calibration: dict[str, Any] | None = None
    """What was measured of these devices, and the step that is predicted from it."""
    network: dict[str, Any] | None = None
    """Figures of the link between hosts, where emulated devices are in several."""
    script: str | None = None
    """Absolute path of a person's own script that each rank runs instead of hetexp's training."""
    script_arguments: tuple[str, ...] = ()
    """What follows the script's name on its command line."""
    store_host: str = "127.0.0.1"
    store_port: int = 0
    working_dir: str = ""
    """Folder the person started from; relative paths in the configuration mean this one."""
    import_paths: tuple[str, ...] = ()
    """Folders that workers append to `sys.path`, so that a person's own modules are found."""

    @property
    def all_devices(self) -> tuple[DeviceSpec, ...]:
        """Every device that takes part: one a rank, but where a single rank drives them all."""
        return self.cards or self.devices

    @property
    def card_batch_sizes(self) -> tuple[int, ...]:
        """Samples of a full global batch that each of a single rank's devices takes."""
        return apportion(sum(self.local_batch_sizes), self.card_shares).counts if self.cards else ()

    def of_ranks(self, ranks: Sequence[int], reasons: Sequence[str] = (), **changes: Any) -> Plan:
        """Return the plan of some of its ranks' devices, in this order, with other values of some fields.

        Args:
            reasons: come first; the sentence of the policy's split goes, as the split is another one.
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
        """Return what one of `all_devices` computes in; `None` if the plan does not say it."""
        return self.precisions[self.rank_of(place)] if self.precisions else None

    def pass_size_of(self, place: int) -> int | None:
        """Return the most samples of one pass on one of `all_devices`.

        `None` means that there is no limit, or that a rank divides its passes among several devices.
        """
        return None if self.cards else self.microbatch_size(place)

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def way(self) -> Topology:
        """How something large is summed over all ranks."""
        return self.route or Topology.flat(self.collective_backend, self.world_size)

    @property
    def reforms(self) -> bool:
        """True if the ranks can leave all their connections and form others: none is a vendor library's.

        A collective of such a library cannot be left by a rank whose peer is gone, nor its process be sure of
        the device afterwards.
        """
        libraries = {group.library for level in self.way.levels for group in level}
        return self.collective_backend == "gloo" and libraries <= {"gloo", "shm"}

    @property
    def boundary_wire(self) -> Wire:
        """What activations and their gradients travel as between stages: `comm.boundary_wire`."""
        wire: Wire = self.config.get("comm", {}).get("boundary_wire", "float32")
        return wire

    @property
    def wire(self) -> str:
        """What gradients travel as between ranks that no vendor's library joins: `comm.wire`."""
        wire: str = self.config.get("comm", {}).get("wire", "float32")
        return wire

    @property
    def emulated(self) -> bool:
        """True if a device is not as it is, or faults are ordered: no number of this run is hardware's."""
        ordered = self.config.get("fault", {}).get("events")
        return bool(ordered) or any(device.emulated for device in self.devices)

    @property
    def paced(self) -> bool:
        """True if a device runs at the pace of a card that is not there: then links are paced as well."""
        return any(device.backend == "emulated" for device in self.devices)

    def microbatch_size(self, rank: int) -> int | None:
        """Return the most samples of one pass of a rank: what the person set, else what its memory holds."""
        wanted: int | None = self.config["trainer"].get("microbatch_size")
        return wanted if wanted is not None or not self.microbatch_sizes else self.microbatch_sizes[rank]

    @property
    def config_hash(self) -> str:
        """Short hash of the configuration; ranks compare it before they train.

        Where the checkpoint is that they go on from is each machine's own.
        """
        text = json.dumps({**self.config, "resume": None}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def write(self, path: Path, durable: bool = True) -> None:
        """Write the plan as JSON, whole or not at all; see `write_bytes` in `hetexp.core.files`."""
        write_json(path, self.to_dict(), durable)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in plain types, as its file holds it."""
        return asdict(self) | {"world_size": self.world_size, "emulated": self.emulated}

    def to_json(self) -> str:
        """Return the plan as one line of JSON."""
        return json.dumps(self.to_dict())

    def placed_as(self, own: Plan) -> Plan:
        """Return the plan with the folders and the way to the store that another one has: another machine's.

        Args:
            own: a plan whose folders are those of this machine.
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
        """Read what `write` wrote."""
        return cls.from_json(path.read_text(encoding="utf-8"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read what `to_json` returned."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Plan:
        """Return the plan of what `to_dict` returned and JSON carried."""
        raw = dict(raw)
        raw.pop("world_size")
        raw.pop("emulated")
        raw["devices"] = tuple(DeviceSpec.from_dict(device) for device in raw["devices"])
        raw["cards"] = tuple(DeviceSpec.from_dict(device) for device in raw["cards"])
        raw["left_out"] = tuple(DeviceSpec.from_dict(device) for device in raw.get("left_out", ()))
        raw["stages"] = tuple(tuple(Stage(**stage) for stage in own) for own in raw["stages"])
        if raw.get("route") is not None:
            raw["route"] = Topology.from_dict(raw["route"])
        for name in _TUPLES:
            raw[name] = tuple(raw[name])
        return cls(**raw)
