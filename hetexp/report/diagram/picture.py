"""The content of a plan's diagram as plain facts: machines, devices, links and exchanged values.

`mermaid.py` and `dot.py` beside this file draw it. Unknown facts are left out, never guessed: a link without
a known rate has no label.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetexp.core.config import own_arguments
from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.errors import logged
from hetexp.core.instantiate import instantiate, untrusted
from hetexp.core.plan import Plan
from hetexp.core.stage import Stage
from hetexp.hardware.detection.pci import LANE_GB_PER_SECOND
from hetexp.hardware.links import links_of

THIS_MACHINE = "this machine"
VENDORS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "apple": "Apple", "cpu": "CPU"}
LONGEST_TITLE = 64
MOST_TITLE_LINES = 3
LONGEST_NAME = 44
LONGEST_PATH = 34


@dataclass(frozen=True)
class Layers:
    """One stage: layers `[first, end)` of the model."""

    pipeline: int | None
    """Number of its pipeline if there are several."""
    stage: int
    first: int
    end: int

    def __str__(self) -> str:
        return f"layer {self.first}" if self.end - self.first == 1 else f"layers {self.first}–{self.end - 1}"


@dataclass(frozen=True)
class Rate:
    """A link's rate in one direction, as its maker states it."""

    name: str | None
    gb_per_second: float
    """10^9 bytes a second."""

    def __str__(self) -> str:
        rate = f"{self.gb_per_second:.3g} GB/s"
        return f"{self.name}, {rate}" if self.name else rate


@dataclass(frozen=True)
class Device:
    """One device of the plan."""

    key: str
    """Unique within the picture, valid in both languages: `d0`."""
    id: str
    name: str
    vendor: str
    emulated: bool
    rank: int | None
    """`None` if it takes no part."""
    link: Rate | None = None
    """Link to its machine's memory; `None` if it is unknown, or the device has no memory of its own."""
    precision: str | None = None
    share: float | None = None
    """Fraction of each global batch, or of a step's work if the model is cut."""
    samples: int | None = None
    """Samples of a full global batch; `None` if a script decides, or its pipeline has them."""
    microbatch_size: int | None = None
    """Most samples of a microbatch, if there are several."""
    layers: tuple[Layers, ...] = ()
    need_bytes: int | None = None
    memory_bytes: int | None = None
    python: str | None = None
    """Interpreter, if it is not the launcher's."""

    @property
    def heading(self) -> str:
        """Its rank and id."""
        return self.id if self.rank is None else f"rank {self.rank} · {self.id}"

    def lines(self) -> list[str]:
        """Return the lines below heading and name."""
        if self.rank is None:
            return ["takes no part: a step is", "as short without it"]
        lines = [VENDORS.get(self.vendor, self.vendor) + (f" · {self.precision}" if self.precision else "")]
        lines += self._work()
        has = f"{self.memory_bytes / GIB:.3g} GiB" if self.memory_bytes is not None else None
        if self.need_bytes is not None:
            need = f"{self.need_bytes / GIB:.1f}" if self.need_bytes >= GIB / 20 else "< 0.1"
            lines.append(f"needs {need} of {has}" if has else f"needs {need} GiB")
        elif has is not None:
            lines.append(f"memory {has}")
        if self.python is not None:
            lines.append(f"python {_end_of(self.python)}")
        return lines

    def _work(self) -> list[str]:
        if self.layers:
            number = self.layers[0].pipeline
            lines = [f"pipeline {number}"] if number is not None else []
            lines += [f"stage {layers.stage}: {layers}" for layers in self.layers]
            return lines + ([f"{self.share:.1%} of the work"] if self.share is not None else [])
        parts = [f"{self.share:.1%}"] if self.share is not None else []
        if self.samples is not None:
            parts.append(f"{self.samples} sample{'' if self.samples == 1 else 's'} a step")
        lines = [" · ".join(parts)] if parts else []
        if self.microbatch_size is not None:
            lines.append(f"in microbatches of at most {self.microbatch_size}")
        return lines


@dataclass(frozen=True)
class MachineBox:
    """One machine with its devices."""

    key: str
    name: str
    emulated: bool
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Arrow:
    """Activations from one stage's device to the next stage's, and their gradients back."""

    sender: str
    receiver: str
    pipeline: int
    network: bool = False
    """Whether they travel between machines."""


@dataclass(frozen=True)
class ExchangeBox:
    """The exchange of gradients or weights."""

    what: str
    """`gradients`, `weights`."""
    when: str
    """`each step`, `every 50 steps`."""
    how: str
    """`gloo, through host memory`."""
    direct: bool
    """Whether the devices' own links carry it; else their machines' memories take part."""
    members: tuple[str, ...]
    """Keys of the participating devices."""


@dataclass(frozen=True)
class Picture:
    """The whole content of a diagram."""

    title: tuple[str, ...]
    """The run's name, in one or more lines."""
    lines: tuple[str, ...]
    """Facts of the whole run."""
    warning: str | None
    """Warning that devices are emulated or altered."""
    machines: tuple[MachineBox, ...]
    arrows: tuple[Arrow, ...]
    exchange: ExchangeBox | None
    network: Rate | None
    """Network between the machines, if its rate is known."""
    remarks: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(device for machine in self.machines for device in machine.devices)


def picture_of(plan: Plan, remarks: Sequence[str] = ()) -> Picture:
    """Return the content of a plan's diagram.

    Args:
        remarks: further sentences.
    """
    strategy = _strategy(plan)
    devices = [_device(plan, place) for place in range(len(plan.all_devices))]
    out = [_left_out(device, place) for place, device in enumerate(plan.left_out)]
    pairs = [*zip(plan.all_devices, devices, strict=True), *zip(plan.left_out, out, strict=True)]
    machines = _machines(pairs)
    network = Rate(_network_name(plan), plan.network["gb_per_second"]) if plan.network is not None else None
    sentences = list(remarks)
    if plan.fallback is not None:
        sentences.insert(0, "Not {from} but {to}: {reason}".format_map(plan.fallback))
    sentences += strategy_problems(plan)
    return Picture(
        title=tuple(_title(plan.name)),
        lines=tuple(_facts(plan, strategy)),
        warning=_warning(plan),
        machines=machines,
        arrows=_arrows(plan, devices),
        exchange=_exchange(plan, devices, strategy),
        network=network,
        remarks=tuple(sentences),
    )


def strategy_problems(plan: Plan) -> list[str]:
    """Return why the strategy is not built here; the picture then lacks what only its class knows."""
    if problems := untrusted({"strategy": own_arguments("strategy", plan.config.get("strategy"))}):
        return problems
    if "strategy" not in plan.config or _strategy(plan) is not None:
        return []
    return ["The drawing lacks what only the strategy's class knows, which cannot be built here."]


def shortened(text: str, longest: int) -> str:
    """Return at most `longest` characters of a text, with `…` instead of its end."""
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"


def _title(name: str) -> list[str]:
    """Return a run's name in lines; a name made of overrides may be cut behind each comma."""
    if len(name) <= LONGEST_TITLE:
        return [name]
    lines = textwrap.wrap(name.replace(",", ", "), LONGEST_TITLE)
    if len(lines) <= MOST_TITLE_LINES:
        return lines
    return [*lines[: MOST_TITLE_LINES - 1], lines[MOST_TITLE_LINES - 1] + " …"]


def _end_of(path: str) -> str:
    """Return the end of a long path behind `…`: paths of environments differ at their ends."""
    if len(path) <= LONGEST_PATH:
        return path
    end = path[1 - LONGEST_PATH :]
    return "…" + (end[end.index("/") :] if "/" in end else end)


def _strategy(plan: Plan) -> Any:
    """Return the strategy, `None` if this machine lacks its class: a plan may come from elsewhere."""
    with logged("the strategy's class cannot be built"):
        built = instantiate(own_arguments("strategy", plan.config["strategy"]))
        return built if hasattr(built, "describe_pipeline") else None
    return None


def _device(plan: Plan, place: int) -> Device:
    device = plan.all_devices[place]
    rank = plan.rank_of(place)
    stages = plan.stages[rank] if plan.stages else ()
    script = plan.script is not None
    samples = None if script or stages else plan.batch_size_of(place)
    size = None if script else plan.pass_size_of(place)
    return Device(
        key=f"d{place}",
        id=device.id,
        name=shortened(device.name, LONGEST_NAME),
        vendor=device.vendor,
        emulated=device.emulated,
        rank=rank,
        link=_link(device),
        precision=plan.precision_of(place),
        share=plan.share_of(place),
        samples=samples,
        microbatch_size=size if size is not None and samples is not None and size < samples else None,
        layers=tuple(_layers(plan, stage) for stage in stages),
        need_bytes=plan.memory_bytes[rank] if plan.memory_bytes else None,
        memory_bytes=device.memory_bytes,
        python=device.python,
    )


def _layers(plan: Plan, stage: Stage) -> Layers:
    several = len(plan.replica_batch_sizes) > 1
    return Layers(stage.replica if several else None, stage.index, stage.first_layer, stage.end_layer)


def _left_out(device: DeviceSpec, place: int) -> Device:
    return Device(
        key=f"out{place}",
        id=device.id,
        name=shortened(device.name, LONGEST_NAME),
        vendor=device.vendor,
        emulated=device.emulated,
        rank=None,
        link=_link(device),
    )


def _link(device: DeviceSpec) -> Rate | None:
    """Return a device's link to its machine's memory, if its facts have the rate."""
    lane = LANE_GB_PER_SECOND.get(device.pcie_generation or 0)
    if lane is not None and device.pcie_lanes is not None:
        return Rate(f"pcie{device.pcie_generation}x{device.pcie_lanes}", lane * device.pcie_lanes)
    if device.card_facts is None or device.vendor == "cpu":
        return None
    return Rate(device.card_facts["link"], device.card_facts["host_link"]["gb_per_second"])


def _machines(pairs: Sequence[tuple[DeviceSpec, Device]]) -> tuple[MachineBox, ...]:
    """Return the machines in the order of their first devices; a pipeline's stages follow one another."""
    hosts = list(dict.fromkeys(spec.host for spec, _ in pairs))
    machines = []
    for place, host in enumerate(hosts):
        devices = sorted((device for spec, device in pairs if spec.host == host), key=_order)
        name = THIS_MACHINE if host is None else f"machine {host}"
        machines.append(MachineBox(f"m{place}", name, host is not None, tuple(devices)))
    return tuple(machines)


def _order(device: Device) -> tuple[bool, int, int]:
    if device.layers:
        return False, device.layers[0].pipeline or 0, device.layers[0].stage
    return device.rank is None, 0, 0


def _network_name(plan: Plan) -> str | None:
    if plan.network is not None and str(plan.network.get("source", "")).startswith("measured"):
        return "measured"
    name = plan.config["hardware"].get("network")
    return str(name) if name is not None else None


def _facts(plan: Plan, strategy: Any) -> list[str]:
    """Return lines on the run as a whole."""
    parts = [f"strategy {plan.strategy}"]
    if len(plan.all_devices) + len(plan.left_out) > 1:
        parts.append(f"balancing {_policy(plan)}")
    if plan.script is None:
        parts.append(f"{plan.config['trainer']['global_batch_size']} samples a step")
    lines = [" · ".join(parts)]
    seconds = plan.predicted_step_seconds or (plan.calibration or {}).get("predicted_step_seconds")
    if seconds is not None:
        lines[0] += f" · {_duration(seconds)} predicted"
    for number, total in enumerate(plan.replica_batch_sizes):
        indices = {s.index for stages in plan.stages for s in stages if s.replica == number}
        ranks = sum(any(s.replica == number for s in stages) for stages in plan.stages)
        text = f"{total} samples a step"
        if strategy is not None:
            text += strategy.describe_pipeline(len(indices), ranks, total)
        several = len(plan.replica_batch_sizes) > 1
        lines.append(f"pipeline {number}: {text}" if several else f"pipeline: {text}")
    return lines


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _policy(plan: Plan) -> str:
    return (
        plan.choices.get("balancing") or str(plan.config["balancing"]["_target_"]).rpartition(".")[2].lower()
    )


def _warning(plan: Plan) -> str | None:
    if not plan.emulated:
        return None
    kind = "EMULATED" if plan.paced else "DEVICES NOT AS THEY ARE"
    return f"{kind}: no number of this run is hardware's"


def _arrows(plan: Plan, devices: Sequence[Device]) -> tuple[Arrow, ...]:
    """Return one arrow from each device to each device that gets activations from it."""
    holders = {(s.replica, s.index): rank for rank, stages in enumerate(plan.stages) for s in stages}
    arrows: dict[tuple[int, int], Arrow] = {}
    for (replica, index), sender in sorted(holders.items()):
        receiver = holders.get((replica, index + 1), sender)
        if receiver != sender:
            between = plan.devices[sender].host != plan.devices[receiver].host
            arrow = Arrow(devices[sender].key, devices[receiver].key, replica, between)
            arrows.setdefault((sender, receiver), arrow)
    return tuple(arrows.values())


def _exchange(plan: Plan, devices: Sequence[Device], strategy: Any) -> ExchangeBox | None:
    """Return the exchange of gradients or weights, `None` if there is none, or it is unknown here."""
    if len(devices) < 2 or strategy is None:
        return None
    text = strategy.describe_exchange(plan)
    if text is None:
        return None
    how, direct = (text.how, text.direct) if text.how is not None else _transport(plan)
    return ExchangeBox(text.what, text.when, how, direct, tuple(device.key for device in devices))


def _transport(plan: Plan) -> tuple[str, bool]:
    """Return the transport of the all-reduce, and whether the devices' own links carry it."""
    if plan.paced and not links_of(plan).staged:
        return "ring over the cards' links", True
    if plan.way.library not in (None, "shm", "gloo"):
        return f"{plan.way.name} ring", True
    return f"{plan.way.name}, through host memory", False
