"""Simulates a large mixed cluster: hosts (boxes) that each have the devices of a plan.

`hardware.network` connects the boxes, and the global batch grows with the devices. The exchange is one flat
ring of all ranks. Hierarchical rings of large clusters are not modelled.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetexp.balancing.base import BalancingPolicy
from hetexp.balancing.solver import solo_rates, solve
from hetexp.core.cost.calibration import joint_seconds
from hetexp.core.cost.step import Links
from hetexp.core.errors import ConfigError, must_be
from hetexp.core.plan import Plan
from hetexp.core.split import apportion
from hetexp.hardware.catalogue import Link
from hetexp.hardware.links import links_of
from hetexp.plan.device_estimates import DeviceEstimates

ALL, BEST = "all, best split", "best"
LONGEST = 300
"""Most characters of a problem."""
MOST = 100_000
"""Most simulated devices."""


@dataclass(frozen=True)
class KindShare:
    """The samples of all devices of one kind."""

    device: int
    """First device of this kind in the plan."""
    devices: int
    """Number of devices in the cluster that take part."""
    fewest: int
    """Fewest samples of a device."""
    most: int
    samples: int
    """Samples of all of them."""


@dataclass(frozen=True)
class ScaledRow:
    """One policy on the cluster."""

    policy: str
    devices: int = 0
    """Number of devices that take part."""
    step_seconds: float | None = None
    samples_per_second: float | None = None
    efficiency: float | None = None
    """Throughput ÷ sum of the throughputs of each device of the cluster alone."""
    compute_seconds: float | None = None
    """The same step without an exchange."""
    solve_seconds: float | None = None
    """Time to compute this split."""
    kinds: tuple[KindShare, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Scaled:
    """A simulated cluster."""

    num_devices: int
    num_hosts: int
    total: int
    """Samples of a step."""
    rows: tuple[ScaledRow, ...]


def scaled(
    plan: Plan,
    estimates: DeviceEstimates,
    num_devices: int,
    policies: Mapping[str, BalancingPolicy],
    network: Link,
) -> Scaled:
    """Return the predictions for a cluster that repeats the plan's devices.

    Args:
        estimates: of all the plan's devices.
        num_devices: of the cluster, at least as many as the plan has.
        policies: by name. Two rows stand for those that measure: the best split over all devices, and over
            the devices that make the step shorter.
        network: between the boxes.

    Raises:
        ConfigError: too few or too many devices.
    """
    box = len(plan.devices)
    if not box <= num_devices <= MOST:
        raise ConfigError(must_be("--scale", f"from {box}, the devices given, to {MOST}", num_devices))
    cluster = Cluster(plan, estimates, num_devices, network)
    rows = [cluster.shared(name, policy) for name, policy in policies.items() if not _settles(policy)]
    rows += [cluster.all(), cluster.best()]
    return Scaled(num_devices, -(-num_devices // box), cluster.total, tuple(rows))


class Cluster:
    """A cluster whose device i is the plan's device i modulo their number."""

    def __init__(self, plan: Plan, estimates: DeviceEstimates, num_devices: int, network: Link) -> None:
        self._plan, self._estimates = replace(plan, network=network.model_dump()), estimates
        self._box = [calibration for calibration in estimates.devices if calibration is not None]
        size = len(self._box)
        self.num_devices = num_devices
        self.total: int = plan.config["trainer"]["global_batch_size"] * num_devices // size
        solo = solo_rates([one.curve for one in self._box], self.total)
        self._solo = sum(solo[i] for i in self._places(num_devices))
        alike = [(d.card or d.name, one) for d, one in zip(plan.devices, self._box, strict=True)]
        self._kinds = [alike.index(one) for one in alike]
        """Each device's first equal device in the box."""

    def shared(self, name: str, policy: BalancingPolicy) -> ScaledRow:
        """Return the row of a policy that does not measure."""
        places = self._places(self.num_devices)
        started = time.perf_counter()
        try:
            shares = policy.shares(
                [self._plan.devices[i] for i in places], [self._plan.precisions[i] for i in places]
            )
        except ConfigError as error:
            reason = " ".join(error.problems)  # which may name every device
            return ScaledRow(name, problem=reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}…")
        counts = apportion(self.total, shares).counts
        return self._row(name, places, counts, time.perf_counter() - started)

    def all(self) -> ScaledRow:
        """Return the best split over all devices."""
        return self._solved(ALL, self._places(self.num_devices))

    def best(self) -> ScaledRow:
        """Return the best row with the fastest kinds of devices, and all, half, a quarter … of the boxes.

        The latency of a ring grows with its ranks, so that fewer devices may be faster.
        """
        order = sorted(range(len(self._box)), key=lambda i: (self._box[i].curve.seconds(self.total), i))
        rows = []
        devices = self.num_devices
        while devices >= len(self._box):
            for kinds in range(1, len(order) + 1):
                used = [i for i in self._places(devices) if i in order[:kinds]]
                rows.append(self._solved(BEST, used))
            devices //= 2
        return min(rows, key=lambda row: (row.problem is not None, row.step_seconds or 0.0))

    def _places(self, num_devices: int) -> list[int]:
        return [i % len(self._box) for i in range(num_devices)]

    def _solved(self, name: str, places: Sequence[int]) -> ScaledRow:
        started = time.perf_counter()
        try:
            split = solve([self._box[i].curve for i in places], self.total)
        except ValueError as error:
            return ScaledRow(name, problem=f"{error}")
        return self._row(name, places, split.counts, time.perf_counter() - started)

    def _row(
        self, name: str, places: Sequence[int], counts: Sequence[int], solve_seconds: float
    ) -> ScaledRow:
        devices = [self._box[i] for i in places]
        step = joint_seconds(devices, counts, self._links(places), self._estimates.exchange)
        quiet = joint_seconds(
            devices, counts, self._links(places), replace(self._estimates.exchange, buckets=())
        )
        caps = [one.curve.cap for one in self._box]
        over = next(
            (i for i, n in zip(places, counts, strict=True) if n > (n if (c := caps[i]) is None else c)), None
        )
        return ScaledRow(
            policy=name,
            devices=len(places),
            step_seconds=step,
            samples_per_second=self.total / step,
            efficiency=self.total / step / self._solo if self._solo else None,
            compute_seconds=quiet,
            solve_seconds=solve_seconds,
            kinds=self._by_kind(places, counts),
            problem=f"does not fit {self._plan.devices[over]}" if over is not None else None,
        )

    def _links(self, places: Sequence[int]) -> Links:
        """Return the links of a part of the cluster, made from those of one or two hosts."""
        used = sorted(set(places))
        hosts = ["0", "1"] if len(places) > len(used) else ["0"]
        few = [replace(self._estimates.linked[i], host=host) for host in hosts for i in used]
        links = links_of(self._plan, few, self._estimates.exchange.measured)
        link_of = dict(zip(used, links.device, strict=False))
        num_hosts = -(-len(places) // len(used))
        exchange = tuple(
            replace(c, ranks=num_hosts) if c.ranks == len(hosts) and not c.shared else c
            for c in links.exchange
        )
        return replace(links, device=tuple(link_of[i] for i in places), exchange=exchange)

    def _by_kind(self, places: Sequence[int], counts: Sequence[int]) -> tuple[KindShare, ...]:
        found: dict[int, list[int]] = {}
        for place, count in zip(places, counts, strict=True):
            found.setdefault(self._kinds[place], []).append(count)
        return tuple(
            KindShare(kind, len(own), min(own), max(own), sum(own)) for kind, own in sorted(found.items())
        )


def _settles(policy: BalancingPolicy) -> bool:
    """Return whether a policy measures the devices, and so ends at the best split."""
    return policy.measures or policy.follows
