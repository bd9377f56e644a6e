"""Which libraries carry a sum over all ranks, chosen by where the devices are and whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.topology import Group, Topology
from hetexp.hardware.backend import backend_class


def choose_collective(wanted: str, devices: Sequence[DeviceSpec]) -> str:
    """Return the backend of the process group of all ranks, which counts and decisions go through.

    Args:
        wanted: `comm.backend`.
    """
    native = _native(devices) if wanted in ("auto", "native") else None
    return native or "gloo"


def choose_route(wanted: str, devices: Sequence[DeviceSpec]) -> Topology:
    """Return how a large tensor is summed over the ranks of these devices.

    The vendor's library inside each group of its cards on a host, shared memory between those groups' leaders
    and all other ranks of the host, gloo between one leader a host. Where all are one vendor's its library
    does all of it.

    Args:
        wanted: `comm.backend`: `auto`, `native`, `shm` (on each host) or `gloo`.
    """
    if len(devices) < 2:
        return Topology()
    if wanted == "gloo":
        return Topology.flat("gloo", len(devices))
    if choose_collective(wanted, devices) != "gloo":
        return Topology.flat(choose_collective(wanted, devices), len(devices))
    hosts: dict[str | None, list[int]] = {}
    for rank, device in enumerate(devices):
        hosts.setdefault(device.host, []).append(rank)
    inside = _vendor_groups(devices) if wanted == "auto" else []
    levels = [inside, [], []]
    for ranks in hosts.values():
        followers = {rank for group in inside for rank in group.ranks[1:]}
        top = tuple(rank for rank in ranks if rank not in followers)
        if len(top) > 1:
            levels[1].append(Group("shm", top))
    if len(hosts) > 1:
        levels[2].append(Group("gloo", tuple(ranks[0] for ranks in hosts.values())))
    return Topology(tuple(tuple(level) for level in levels if level))


def choose_routes(wanted: str, devices: Sequence[DeviceSpec]) -> list[Topology]:
    """Return the chosen route, and what takes its place where it does not carry: one after the other.

    What a person asks for by name has nothing in its place.
    """
    chosen = [choose_route(wanted, devices)]
    if wanted == "auto" and len(devices) > 1:
        chosen += [choose_route("shm", devices), choose_route("gloo", devices)]
    return list(dict.fromkeys(chosen))


def routed(plan: Plan) -> Plan:
    """Return the plan with what its devices exchange by, and the sentence that says so.

    A plan without a route stays without one. Whoever changes a plan's devices calls it again.
    """
    wanted = plan.config.get("comm", {}).get("backend", "auto")
    plan = replace(plan, collective_backend=choose_collective(wanted, plan.devices))
    if plan.route is None:
        return plan
    route = choose_route(wanted, plan.devices)
    others = [reason for reason in plan.reasons if not reason.startswith(_BEGINNING)]
    why = [route_reason(route, plan.devices)] if route.levels else []
    return replace(plan, route=route, reasons=(*others, *why))


def route_of_all(plan: Plan) -> Topology:
    """Return how ranks of the plan's devices sum something large, whatever its strategy."""
    return choose_route(plan.config.get("comm", {}).get("backend", "auto"), plan.devices)


def routes_to_try(plan: Plan) -> list[Topology]:
    """Return the plan's route, and what takes its place where it does not carry."""
    wanted = plan.config.get("comm", {}).get("backend", "auto")
    if plan.route is not None:
        others = choose_routes(wanted, plan.devices)
        return others[others.index(plan.route) :] if plan.route in others else [plan.route]
    # What counts and decisions go through where nothing large is exchanged.
    others = [Topology.flat("gloo", plan.world_size)] if wanted == "auto" else []
    return list(dict.fromkeys([plan.way, *others]))


_BEGINNING = "The exchange goes "


def route_reason(route: Topology, devices: Sequence[DeviceSpec]) -> str:
    """Say what carries a sum over all ranks."""
    kinds = ", ".join(dict.fromkeys(device.backend for device in devices))
    if route.library == "shm":
        return f"{_BEGINNING}by shm, in memory that all ranks share ({kinds})."
    if route.library == "gloo":
        return f"{_BEGINNING}by gloo, through host memory ({kinds})."
    if route.library is not None:
        return f"{_BEGINNING}by {route.library}, as all devices are one vendor's."
    steps = []
    for level in route.levels:
        by_library: dict[str, list[str]] = {}
        for group in level:
            members = " + ".join(devices[rank].id for rank in group.ranks)
            by_library.setdefault(group.library, []).append(members)
        steps += [f"by {library} over {' and '.join(sets)}" for library, sets in by_library.items()]
    return f"{_BEGINNING}{', then '.join(steps)}."


def _card(device: DeviceSpec) -> tuple[str | None, str]:
    """Return what makes it this card. By address: instances that one card is cut into have own UUIDs."""
    return device.host, device.pci or device.uuid or device.id


def _native(devices: Sequence[DeviceSpec]) -> str | None:
    """Return the library that sums over all of these devices by itself, `None` where none does.

    NCCL refuses ranks that share a card.
    """
    cards = {_card(device) for device in devices}
    backends = {device.backend for device in devices}
    # AMD's library answers to NVIDIA's name, and the two do not understand each other.
    if len(cards) < len(devices) or len(backends) != 1:
        return None
    return backend_class(*backends).native_collective


def _vendor_groups(devices: Sequence[DeviceSpec]) -> list[Group]:
    """Return the groups of at least two cards of one host that a vendor's library sums over."""
    together: dict[tuple[str | None, str], list[int]] = {}
    for rank, device in enumerate(devices):
        together.setdefault((device.host, device.backend), []).append(rank)
    groups = []
    for ranks in together.values():
        library = _native([devices[rank] for rank in ranks])
        if library is not None and len(ranks) > 1:
            groups.append(Group(library, tuple(ranks)))
    return groups
