"""Precisions by name, and which of them each device computes in.

`bfloat16` and `float16` mean that the model's large operations run in that type, while weights, gradients,
the exchange and the optimizer's state stay in float32 (autocast). The devices' own facts say which precisions
are native: torch reports bfloat16 also for cards that only imitate it (pytorch/pytorch#115924).
"""

from __future__ import annotations

from collections.abc import Sequence

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import must_be

SHORT_FORMS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""Short names in a configuration."""
AUTOCAST = ("bfloat16", "float16")
"""Precisions of the computation only: weights and the exchange stay in float32."""
PREFERRED = ("bfloat16", "float16", "float32")
"""Order of `auto` and `auto_common`: bfloat16 has float32's range and needs no loss scale."""
CERTAIN = ("float32",)
"""Precisions of a device whose native precisions are not known."""


def long_name(value: object) -> object:
    """Return the long name of a precision's short name, and any other value as it is."""
    return SHORT_FORMS.get(value, value) if isinstance(value, str) else value


def choose_precisions(wanted: str, devices: Sequence[DeviceSpec]) -> tuple[str, ...]:
    """Return the precision of each rank's computation.

    Args:
        wanted: `trainer.precision`.
        devices: of the ranks, without `precision_problems`.
    """
    if wanted == "auto":
        return tuple(_best([device]) for device in devices)
    return (_best(devices) if wanted == "auto_common" else wanted,) * len(devices)


def precision_problems(wanted: str, devices: Sequence[DeviceSpec]) -> list[str]:
    """Return one sentence that names every device that does not compute natively in a fixed precision.

    A device whose precisions are not known is not refused: its rank tries the precision before training.
    """
    unfit = [d for d in devices if d.precisions is not None and wanted not in d.precisions]
    if wanted in ("auto", "auto_common") or not unfit:
        return []
    able = [(str(device), ", ".join(device.precisions or ())) for device in unfit]
    first, *others = able
    accepted = f"one that {first[0]} computes in ({first[1]})"
    accepted += "".join(f" and {device} in ({names})" for device, names in others)
    fix = "Write trainer.precision=auto, which chooses for each device, or auto_common, one for all."
    return [must_be("trainer.precision", accepted, wanted, fix)]


def precision_reasons(wanted: str, devices: Sequence[DeviceSpec]) -> list[str]:
    """Return the reasons for the precisions of the devices, as sentences."""
    chosen = choose_precisions(wanted, devices)
    unknown = [device.id for device in devices if device.precisions is None]
    if wanted == "auto":
        split = ", ".join(f"{device.id} {name}" for device, name in zip(devices, chosen, strict=True))
        reasons = [f"Precision auto takes bfloat16 where it is native, else float16, else float32: {split}."]
    elif wanted == "auto_common":
        reasons = [_common_reason(chosen[0], devices)]
    elif wanted == "float32":
        reasons = []  # the default needs no reason
    else:
        reasons = [f"Every device computes in {wanted}, as trainer.precision says."]
    if unknown and wanted in ("auto", "auto_common"):
        reasons.append(f"Which precisions {', '.join(unknown)} has is not known: float32 is taken.")
    elif unknown and wanted not in CERTAIN:
        reasons.append(
            f"Whether {', '.join(unknown)} has {wanted} is not known: the device is asked at the start."
        )
    if any(name in AUTOCAST for name in chosen):
        reasons.append("Weights, gradients, their exchange and the optimizer stay in float32.")
    if "float16" in chosen:
        names = ", ".join(d.id for d, name in zip(devices, chosen, strict=True) if name == "float16")
        reasons.append(f"All ranks share one loss scale, because of float16 on {names}.")
    return reasons


def exchanged_in(precisions: Sequence[str]) -> str:
    """Return the type of exchanged gradients, the same on all ranks."""
    return "float64" if "float64" in precisions else "float32"


def _best(devices: Sequence[DeviceSpec]) -> str:
    """Return the first preferred precision that all devices have; float32 if there is none."""
    native = [device.precisions or CERTAIN for device in devices]
    return next((name for name in PREFERRED if all(name in names for names in native)), "float32")


def _common_reason(chosen: str, devices: Sequence[DeviceSpec]) -> str:
    """Return the reason for a common precision: which devices lack the preferred ones."""
    text = f"Precision auto_common takes {chosen} on every device"
    missing = []
    for name in PREFERRED[: PREFERRED.index(chosen)]:
        without = [d.id for d in devices if d.precisions is not None and name not in d.precisions]
        if without:
            missing.append(f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no native {name}")
    return f"{text}: {'; '.join(missing)}." if missing else f"{text}."
