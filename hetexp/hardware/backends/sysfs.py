"""Reads the kernel's files about a card of any vendor: its DRM nodes, its sensors, who holds it.

Files and units: https://docs.kernel.org/gpu/amdgpu/driver-misc.html (AMD), sysfs-driver-intel-i915-hwmon and
-xe-hwmon of Linux's Documentation/ABI/testing (Intel), https://docs.kernel.org/gpu/drm-usage-stats.html
(processes).
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hetexp.hardware.detection.detected import Process
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import PciCard

COMPUTES_FROM_BYTES = 2**30
"""A process that holds this much of a card counts as computing, whichever engine it uses: a process that only
draws holds less."""
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_COMPUTE_ENGINES = ("drm-engine-compute", "drm-cycles-ccs")
"""Time or cycles on the engines that only compute: as i915 and amdgpu call them, as xe does."""
_MEMORY = (("drm-resident-vram", "drm-resident-local"), ("drm-memory-vram",))
"""Keys of a client's memory on the card: those of xe and i915, else the older ones of amdgpu, which newer
drivers write as well. `vram0`, `vram1` are tiles."""
_NO_ANSWER = b"\xff\xff"
"""Bytes that a bus reads if no device answers; no vendor has this number."""


@dataclass(frozen=True)
class KernelCard:
    """A card in the kernel's files."""

    machine: Machine
    address: str
    """Address on the PCI bus, as the kernel writes it."""
    bus: PciCard | None
    """The card in the list of the bus, if it is there and was read."""

    @property
    def folder(self) -> Path:
        """Folder of the PCI device, which may not exist."""
        return self.machine.path(f"/sys/bus/pci/devices/{self.address}")

    def node(self, kind: str) -> Path | None:
        """Return the DRM folder of the card, `None` if its driver made none.

        Args:
            kind: `card` (`…/drm/card1`) or `renderD` (`…/drm/renderD128`).
        """
        return next((path for path in _sorted(self.folder / "drm") if path.name.startswith(kind)), None)

    def number(self, name: str) -> int | None:
        """Return the number in a file of the device."""
        return self.machine.number(self.folder / name)

    def sensor(self, name: str) -> int | None:
        """Return the number in a file of the card's sensors (`…/hwmon/hwmon3`)."""
        folder = next(iter(_sorted(self.folder / "hwmon")), None)
        return self.machine.number(folder / name) if folder is not None else None

    def reading(self, divisor: float, *names: str) -> float | None:
        """Return the first positive number among sensors, in another unit; `None` if there is none."""
        numbers = (positive(self.sensor(name)) for name in names)
        return next((number / divisor for number in numbers if number is not None), None)

    def fan(self) -> float | None:
        """Return the speed of the card's fan as a fraction of the highest."""
        for names in (("fan1_input", "fan1_max"), ("pwm1", "pwm1_max")):
            speed, most = map(self.sensor, names)
            if speed is not None and most is not None and 0 <= speed <= most and most > 0:
                return speed / most
        return None

    def energy_joules(self) -> float | None:
        """Return the energy of an Intel card, or else of its package, since its driver was loaded."""
        return self.reading(1e6, "energy1_input", "energy2_input")

    def off_the_bus(self) -> str | None:
        """Return a sentence that the card no longer answers on the PCI bus, `None` if it answers.

        A sleeping card is not woken, and counts as answering.
        """
        if self.machine.text(self.folder / "power" / "runtime_status") == "suspended":
            return None
        try:
            with (self.folder / "config").open("rb") as config:
                vendor = config.read(2)
        except OSError:
            return None
        if vendor != _NO_ANSWER:
            return None
        return "it no longer answers on the PCI bus; see sudo dmesg, then restart the machine"


def positive(number: int | None) -> int | None:
    """Return a number, `None` for 0: drivers write 0 if they do not know the number."""
    return number if number is not None and number > 0 else None


def percent(number: float | None) -> float | None:
    """Return a percentage as a fraction, `None` if it is none."""
    return number / 100 if number is not None and 0 <= number <= 100 else None


def host_memory(machine: Machine) -> tuple[int | None, int | None]:
    """Return the host's total and available bytes as Linux counts them."""
    sizes = {}
    for line in (machine.text("/proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isascii() and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    return positive(sizes.get("MemTotal")), sizes.get("MemAvailable")


def driver_version(machine: Machine, module: str | None) -> str | None:
    """Return `amdgpu 6.12.12`, or `xe of Linux 6.14.0` for one that comes with the kernel."""
    if module is None:
        return None
    version = machine.text(f"/sys/module/{module}/version")
    kernel = machine.text("/proc/sys/kernel/osrelease")
    if version:
        return f"{module} {version}"
    return f"{module} of Linux {kernel}" if kernel else module


def wrong_driver(card: PciCard, accepted: tuple[str, ...]) -> str | None:
    """Return why a card's kernel driver cannot compute, with the fix; `None` if it is an accepted one."""
    names = " or ".join(accepted)
    if card.driver in accepted:
        return None
    if card.driver is None:
        return f"no kernel driver is bound to it; load {names} (sudo modprobe {accepted[0]})"
    if card.driver in ("vfio-pci", "pci-stub"):
        return f"it is reserved for a virtual machine ({card.driver}); give it back to {names}"
    return f"the kernel driver {card.driver} is bound to it, which cannot compute; {names} can"


def closed(machine: Machine, name: str, container: str) -> str | None:
    """Return why this process cannot open a device file, with the fix; `None` if it can.

    Args:
        name: `/dev/dri/renderD128`.
        container: options with which docker passes it on.
    """
    path = machine.path(name)
    if not path.exists():
        return f"{name} is absent; a container is given it with docker run {container}"
    if machine.may_open(path):
        return None
    return (
        f"this user may not open {name}; add it to the group {_group(path)} "
        f"(sudo usermod -aG {_group(path)} $USER) and log in again"
    )


def _group(path: Path) -> str:
    """Return the group that a device file is open to; by custom it is `render`."""
    with suppress(OSError, KeyError, ImportError):
        import grp

        number = path.stat().st_gid
        if number != 0 and number not in os.getgroups():
            return grp.getgrgid(number).gr_name
    return "render"


@dataclass
class _Client:
    """A process on a card, summed over its DRM clients."""

    memory: int | None = None
    computed: bool = False
    seen: set[str] = field(default_factory=set)
    """Ids of clients that were counted: each copy of a file descriptor shows the same client."""


def drm_processes(machine: Machine) -> dict[str, tuple[Process, ...]]:
    """Return the processes that hold each card, by PCI address, as far as this user may see their files.

    A process computes if it used an engine that only computes, or holds much memory. If a chip has no such
    engine, only the memory distinguishes computing from drawing.
    """
    clients: dict[tuple[str, int], _Client] = {}
    for folder in _sorted(machine.path("/proc")):
        if folder.name.isdecimal():
            _read_clients(folder, int(folder.name), clients)
    holders: dict[str, list[Process]] = {}
    for (address, pid), client in sorted(clients.items()):
        large = client.memory is not None and client.memory >= COMPUTES_FROM_BYTES
        holders.setdefault(address, []).append(Process(pid, client.memory, client.computed or large))
    return {address: tuple(processes) for address, processes in holders.items()}


def _read_clients(folder: Path, pid: int, clients: dict[tuple[str, int], _Client]) -> None:
    """Add a process's clients; a process that has ended or belongs to another user adds none."""
    with suppress(OSError):
        handle = os.open(folder / "fd", os.O_RDONLY | os.O_DIRECTORY)
        try:
            held = [fd for fd in os.listdir(handle) if _is_drm(handle, fd)]  # noqa: PTH208 - an open folder
        finally:
            os.close(handle)
        for fd in held:
            with suppress(OSError):
                _add_client(
                    (folder / "fdinfo" / fd).read_text(encoding="ascii", errors="replace"), pid, clients
                )


def _is_drm(handle: int, fd: str) -> bool:
    try:
        return os.readlink(fd, dir_fd=handle).startswith("/dev/dri/")
    except OSError:
        return False


def _add_client(text: str, pid: int, clients: dict[tuple[str, int], _Client]) -> None:
    facts = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    address, number = facts.get("drm-pdev"), facts.get("drm-client-id")
    if address is None or number is None:
        return
    client = clients.setdefault((address.lower(), pid), _Client())
    if number in client.seen:
        return
    client.seen.add(number)
    for names in _MEMORY:
        sizes = [_bytes(value) for key, value in facts.items() if key.startswith(names)]
        if any(size is not None for size in sizes):
            client.memory = (client.memory or 0) + sum(size or 0 for size in sizes)
            break
    for key, value in facts.items():
        used = value.partition(" ")[0]
        if key.startswith(_COMPUTE_ENGINES) and used.isdecimal() and int(used) > 0:
            client.computed = True


def _bytes(value: str) -> int | None:
    number, _, unit = value.partition(" ")
    if not number.isdecimal() or unit not in _UNITS:
        return None
    return int(number) * _UNITS[unit]


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
