"""Which devices take part (config group `hardware`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic import ValidationInfo as Info
from pydantic_core import PydanticCustomError

from hetexp.core.errors import must_be
from hetexp.core.section import Name, Section, as_text

Vendor = Literal["nvidia", "intel", "amd", "apple", "cpu"]


class DeviceEntry(Section):
    """One entry of `hardware.devices`: a device by name, or every card of a vendor."""

    device: str | None = None
    """Device by name: `auto`, `cpu`, `cpu:1`, `cuda:0` or `emulated:<card>`. A plain string in the list means
    this key."""
    vendor: Vendor | None = None
    """Every card of this vendor, instead of a device by name. `cpu` is the machine's own and never
    missing."""
    match: Name | None = None
    """Only the vendor's cards whose names have these words. `A100` finds *NVIDIA A100-SXM4-80GB*, but `RTX
    3080` does not find the *RTX 3080 Ti*."""
    emulate_as: Name | None = None
    """Card to emulate if this machine has no such card (see `hardware.missing`)."""
    efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of its peak that the emulated card reaches; `null`: as `hardware.efficiency` says."""
    overhead_seconds: PositiveFloat | None = None
    """Fixed cost of a pass, and of an update, on the emulated card."""
    count: PositiveInt | None = None
    """Number of CPU ranks or emulated cards, or the most cards of the vendor. Cards that other entries name
    or took before do not count."""
    python: str | None = None
    """Interpreter that drives this device; `null`: the launcher's own."""
    slow: Annotated[float, Field(ge=1)] | None = None
    """Factor that slows the device down, a real one as well."""
    memory_gib: PositiveFloat | None = None
    """Memory that the device may use, a real one as well; `null`: all of it."""
    host: str | None = None
    """Host of an emulated device, for mixes over several hosts (see `hardware.network`)."""


class HardwareConfig(Section):
    """Which devices take part: `devices` or `cards`, one of them. The group's option gives it."""

    catalogue: str | None = None
    """YAML file with your own cards and links, which extends the shipped catalogue."""
    cards: Annotated[list[str], Field(min_length=1)] | None = None
    """Devices by card names, instead of `devices`: `[rtx_4090,a380]`. `hardware=mix` is the option for it.
    The real cards take part if all of them are found. If none is, all are emulated."""
    devices: list[DeviceEntry] = []
    """Devices by name or vendor."""
    gpu_ids: int | str | list[int | str] | None = None
    """Cards by number, name or UUID, instead of `devices`: `[0,2]`, `[cuda:0,xpu:0]`, `all`, `available` or
    `recommend:2`. `hetexp gpus` lists them."""
    cuda_ids: int | str | list[int | str] | None = None
    """Older name of `gpu_ids`."""
    backends: list[str] = []
    """Your own backends, by the dotted paths of their classes (`hetexp.hardware.backend.Backend`). Their
    cards are found and chosen like all others."""
    default_gpu_selection: Literal["all", "available", "manual"] = "available"
    """Cards that `auto` takes. `available` are those not in use, and `manual` takes none without
    `gpu_ids`."""
    multi_gpu_enabled: bool = True
    """Whether several cards may take part; `false`: one card only."""
    share_devices: bool = False
    """Whether a card may be in use by others, and by several ranks at once (`[0,0]`)."""
    busy_memory_mib: NonNegativeFloat = 256.0
    """Memory of another process, in MiB, that makes a card busy. The process must also compute on the
    card."""
    max_temperature_celsius: PositiveFloat = 90.0
    """Highest temperature of a card that is chosen."""
    power_budget_watts: PositiveFloat | None = None
    """Highest sum of all chosen cards' power limits."""
    device_power_watts: PositiveFloat | None = None
    """Highest power limit of a chosen card."""
    check_memory: bool = True
    """Whether to estimate memory first, and to refuse a plan that does not fit. The estimate builds the data
    set once more."""
    missing: Literal["auto", "emulate", "emulate_all", "error", "drop"] = "auto"
    """What to do if a vendor of the mix is absent. `auto` emulates the mix only if all of its vendors are
    absent. `emulate` adds the absent ones beside the real cards. `emulate_all` emulates the whole mix."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank; `null`: all ranks share the host's cores, a card's rank takes at most four
    of those that its loader processes leave."""
    time_scale: PositiveFloat | None = None
    """Real seconds of one emulated second; `null`: the fewest that this machine can keep."""
    efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of their peak that emulated cards reach; `null`: 0.45, as with a large model. It holds for
    entries without an efficiency of their own."""
    overhead_seconds: PositiveFloat | None = None
    """Fixed cost of a pass, and of an update, on emulated cards; `null`: 1e-5."""
    network: str = "ethernet_10g"
    """Link of the catalogue between the hosts of emulated devices."""
    deviation_seed: NonNegativeInt | None = None
    """Seed that makes emulated cards differ from their figures; `null`: they do not. Only measuring finds the
    difference."""

    @field_validator("cards", mode="before")
    @classmethod
    def _one_card(cls, value: Any) -> Any:
        """`t4` means `[t4]`, and a number in the list is a name (`6600`)."""
        entries = [value] if isinstance(value, (str, int)) else value
        return [as_text(entry) for entry in entries] if isinstance(entries, list) else entries

    @field_validator("devices", mode="before")
    @classmethod
    def _short_forms(cls, value: Any, info: Info) -> Any:
        """`cpu` means `[cpu]`, and a string in the list means `{device: …}`; `cards` may stand instead."""
        if value is None and info.data.get("cards", "wrong, and reported") is not None:
            return []
        entries = [value] if isinstance(value, (str, dict)) else value
        if not isinstance(entries, list):
            return entries
        if not entries:
            raise PydanticCustomError("too_short", "a list with at least one entry")
        return [{"device": entry} if isinstance(entry, str) else entry for entry in entries]


def hardware_problems(hardware: HardwareConfig) -> list[str]:
    """Return the clashes between the keys of a section whose values are each right."""
    problems = []
    if hardware.cards is not None and hardware.devices:
        fix = "Add hardware=mix, which leaves the devices to the cards."
        accepted = "null where `hardware.devices` is given"
        problems.append(must_be("hardware.cards", accepted, hardware.cards, fix))
    if hardware.cards is None and not hardware.devices:
        problems.append("`hardware.devices` must be given where `hardware.cards` is null, but is missing.")
    for position, entry in enumerate(hardware.devices):
        key = f"hardware.devices[{position}]"
        card = entry.emulate_as
        if entry.device is not None and card is not None:
            fix = f"A card is emulated by name: 'emulated:{card}'."
            problems.append(must_be(f"{key}.emulate_as", "absent beside `device`", card, fix))
        if entry.match is not None and entry.vendor is None:
            problems.append(must_be(f"{key}.match", "absent without `vendor`", entry.match))
        emulated = card is not None or (entry.device or "").startswith("emulated:")
        for figure in ("efficiency", "overhead_seconds"):
            value = getattr(entry, figure)
            if value is not None and not emulated:
                fix = "It is beside 'emulated:<card>' or `emulate_as`."
                problems.append(must_be(f"{key}.{figure}", "absent where no card is emulated", value, fix))
        problems += either(key, "device", entry.device, "vendor", entry.vendor)
    return problems


def either(key: str, first: str, value: object, second: str, other: object) -> list[str]:
    """Return the problem of an entry that gives both of two keys, or neither."""
    if (value is None) != (other is None):
        return []
    named = "neither" if value is None else "both"
    return [f"`{key}` must name either `{first}` or `{second}`, but names {named} instead."]
