"""Precisions by name, and which of them each device computes in.

`bfloat16` and `float16` mean that the model's large operations run in that type, while weights, gradients,
the exchange and the optimizer's state stay in float32 (autocast). What is native comes from the devices' own
facts: torch says yes to bfloat16 on cards that only imitate it (pytorch/pytorch#115924).
"""

from __future__ import annotations

from collections.abc import Sequence

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import must_be

SHORT_FORMS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""What else a person may write."""
AUTOCAST = ("bfloat16", "float16")
"""Precisions of the computation only; all that is kept and exchanged is float32 under them."""
PREFERRED = ("bfloat16", "float16", "float32")
"""How `auto` and `auto_common` choose: bfloat16 has float32's range and needs no loss scale."""
CERTAIN = ("float32",)
"""What a device of which nothing is known computes in."""


def long_name(value: object) -> object:
    """Return the long name of a precision's short form, and anything else as it is."""
    return SHORT_FORMS.get(value, value) if isinstance(value, str) else value


def choose_precisions(wanted: str, devices: Sequence[DeviceSpec]) -> tuple[str, ...]:
    """Return the precision that each device computes in, one a rank.

    Args:
        wanted: `trainer.precision`.
        devices: none of them speaks against it (`precision_problems`).
    """
    if wanted == "auto":
        return tuple(_best([device]) for device in devices)
    return (_best(devices) if wanted == "auto_common" else wanted,) * len(devices)


def precision_problems(wanted: str, devices: Sequence[DeviceSpec]) -> list[str]:
    """Return one sentence that names every device which does not compute natively in a fixed precision.

    A device of which nothing is known is not refused: its rank asks it before training.
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
    """Return why each device computes in what it does, one sentence each."""
    chosen = choose_precisions(wanted, devices)
    unknown = [device.id for device in devices if device.precisions is None]
    if wanted == "auto":
        split = ", ".join(f"{device.id} {name}" for device, name in zip(devices, chosen, strict=True))
        reasons = [f"Precision auto takes bfloat16 where it is native, else float16, else float32: {split}."]
    elif wanted == "auto_common":
        reasons = [_common_reason(chosen[0], devices)]
    elif wanted == "float32":
        reasons = []  # as everywhere; a line in each plan would say nothing
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
    """Return the type of gradients on their way between ranks; the same on all of them."""
    return "float64" if "float64" in precisions else "float32"


def _best(devices: Sequence[DeviceSpec]) -> str:
    """Return the first preferred precision that each of the devices has, float32 where there is none."""
    known = [device.precisions or CERTAIN for device in devices]
    return next((name for name in PREFERRED if all(name in names for names in known)), "float32")


def _common_reason(chosen: str, devices: Sequence[DeviceSpec]) -> str:
    """Say which precisions that would have come first some device lacks."""
    text = f"Precision auto_common takes {chosen} on every device"
    missing = []
    for name in PREFERRED[: PREFERRED.index(chosen)]:
        without = [d.id for d in devices if d.precisions is not None and name not in d.precisions]
        if without:
            missing.append(f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no native {name}")
    return f"{text}: {'; '.join(missing)}." if missing else f"{text}."
