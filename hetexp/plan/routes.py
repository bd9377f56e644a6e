"""Chooses the libraries for a sum over all ranks, by the hosts and vendors of the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.topology import Group, Topology
from hetexp.hardware.backend import backend_class


def choose_collective(backend: str, devices: Sequence[DeviceSpec]) -> str:
    """Return the backend of the process group of all ranks, for counts and decisions.

    Args:
        backend: `comm.backend`.
    """
    native = _native(devices) if backend in ("auto", "native") else None
    return native or "gloo"


def choose_route(backend: str, devices: Sequence[DeviceSpec]) -> Topology:
    """Return how a large tensor is summed over the ranks of these devices.

    The first level is the vendor's library inside each group of its cards on a host. The second level is
    shared memory between the leaders of these groups and all other ranks of the host. The third level is gloo
    between the leaders of the hosts. If all devices are of one vendor, its library does all of it.

    Args:
        backend: `comm.backend`: `auto`, `native`, `shm` (on each host) or `gloo`.
    """
    if len(devices) < 2:
        return Topology()
    if backend == "gloo":
        return Topology.flat("gloo", len(devices))
    if choose_collective(backend, devices) != "gloo":
        return Topology.flat(choose_collective(backend, devices), len(devices))
    hosts: dict[str | None, list[int]] = {}
    for rank, device in enumerate(devices):
        hosts.setdefault(device.host, []).append(rank)
    inside = _vendor_groups(devices) if backend == "auto" else []
    levels = [inside, [], []]
    for ranks in hosts.values():
        followers = {rank for group in inside for rank in group.ranks[1:]}
        top = tuple(rank for rank in ranks if rank not in followers)
        if len(top) > 1:
            levels[1].append(Group("shm", top))
    if len(hosts) > 1:
        levels[2].append(Group("gloo", tuple(ranks[0] for ranks in hosts.values())))
    return Topology(tuple(tuple(level) for level in levels if level))


def choose_routes(backend: str, devices: Sequence[DeviceSpec]) -> list[Topology]:
    """Return the chosen route, and those to try if it fails, in their order.

    A backend that the configuration names has no replacement.
    """
    chosen = [choose_route(backend, devices)]
    if backend == "auto" and len(devices) > 1:
        chosen += [choose_route("shm", devices), choose_route("gloo", devices)]
    return list(dict.fromkeys(chosen))


def routed(plan: Plan) -> Plan:
    """Return the plan with the libraries of its exchange, and a sentence about them.

    A plan without a route stays without one. Every change of a plan's devices needs a new call.
    """
    backend = plan.config.get("comm", {}).get("backend", "auto")
    plan = replace(plan, collective_backend=choose_collective(backend, plan.devices))
    if plan.route is not None:
        route = choose_route(backend, plan.devices)
        others = [reason for reason in plan.reasons if not reason.startswith(_PREFIX)]
        why = [route_reason(route, plan.devices)] if route.levels else []
        plan = replace(plan, route=route, reasons=(*others, *why))
    return replace(plan, aborts=_aborts(plan))


def _aborts(plan: Plan) -> bool:
    """Return whether all vendors' libraries that join a plan's ranks can abort; true without any."""
    used = plan.way.libraries | {plan.collective_backend}
    backends = [backend_class(device.backend) for device in plan.devices]
    return all(backend.native_aborts for backend in backends if backend.native_collective in used)


def route_of_all(plan: Plan) -> Topology:
    """Return how the ranks of the plan's devices would sum a large tensor, for any strategy."""
    return choose_route(plan.config.get("comm", {}).get("backend", "auto"), plan.devices)


def routes_to_try(plan: Plan) -> list[Topology]:
    """Return the plan's route, and those to try if it fails, in their order."""
    backend = plan.config.get("comm", {}).get("backend", "auto")
    if plan.route is not None:
        others = choose_routes(backend, plan.devices)
        return others[others.index(plan.route) :] if plan.route in others else [plan.route]
    # Without large tensors only counts and decisions are exchanged.
    others = [Topology.flat("gloo", plan.world_size)] if backend == "auto" else []
    return list(dict.fromkeys([plan.way, *others]))


_PREFIX = "The exchange goes "


def route_reason(route: Topology, devices: Sequence[DeviceSpec]) -> str:
    """Return a sentence about the libraries of a sum over all ranks."""
    kinds = ", ".join(dict.fromkeys(device.backend for device in devices))
    if route.library == "shm":
        return f"{_PREFIX}by shm, in memory that all ranks share ({kinds})."
    if route.library == "gloo":
        return f"{_PREFIX}by gloo, through host memory ({kinds})."
    if route.library is not None:
        return f"{_PREFIX}by {route.library}, as all devices are one vendor's."
    steps = []
    for level in route.levels:
        by_library: dict[str, list[str]] = {}
        for group in level:
            members = " + ".join(devices[rank].id for rank in group.ranks)
            by_library.setdefault(group.library, []).append(members)
        steps += [f"by {library} over {' and '.join(sets)}" for library, sets in by_library.items()]
    return f"{_PREFIX}{', then '.join(steps)}."


def _card(device: DeviceSpec) -> tuple[str | None, str]:
    """Return host and address of a card; the instances of a card share its address, but have own UUIDs."""
    return device.host, device.pci or device.uuid or device.id


def _native(devices: Sequence[DeviceSpec]) -> str | None:
    """Return the vendor's library that sums over all of these devices; `None` if there is none.

    NCCL refuses ranks that share a card.
    """
    cards = {_card(device) for device in devices}
    backends = {device.backend for device in devices}
    # AMD's library has the name of NVIDIA's, but the two cannot exchange with each other.
    if len(cards) < len(devices) or len(backends) != 1:
        return None
    return backend_class(*backends).native_collective


def _vendor_groups(devices: Sequence[DeviceSpec]) -> list[Group]:
    """Return the groups of at least two cards of one host that a vendor's library sums over."""
    ranks_of: dict[tuple[str | None, str], list[int]] = {}
    for rank, device in enumerate(devices):
        ranks_of.setdefault((device.host, device.backend), []).append(rank)
    groups = []
    for ranks in ranks_of.values():
        library = _native([devices[rank] for rank in ranks])
        if library is not None and len(ranks) > 1:
            groups.append(Group(library, tuple(ranks)))
    return groups
