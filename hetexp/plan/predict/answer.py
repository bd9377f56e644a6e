"""The answer of a prediction in one sentence: what to type, and how much faster than one device it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hetexp.core.device import DeviceSpec, plain_name
from hetexp.plan.predict.inputs import PredictedRun
from hetexp.plan.predict.paying_batch import LARGEST_MULTIPLE
from hetexp.plan.predict.runs import Prediction


def answer(prediction: Prediction) -> str:
    """Return one sentence: the recommended row, its gain over the fastest device alone, and the words for it.

    If devices are left out, it also says with which larger batch they pay.
    """
    best, devices = prediction.best, prediction.plan.devices
    if best is None:
        return prediction.reasons[0]
    used = [devices[rank] for rank in best.ranks]
    left_out = [device for rank, device in enumerate(devices) if rank not in best.ranks]
    batch = _larger_batch(prediction) if left_out else ""
    if len(used) == 1:
        name = names_of(used).replace("the", "The", 1)
        if not left_out:
            return f"{name}: {best.samples_per_second:,.0f} samples/s (`strategy={best.strategy}`)."
        return f"{name} alone is fastest{batch}."
    who = f"all {len(used)} devices" if len(used) > 2 else "both devices"
    if left_out:
        who = f"{names_of(used)}, without {names_of(left_out)}"
    words = f"strategy={best.strategy}"
    if best.policy is not None and best.policy != prediction.preferred:
        words += f" balancing={best.policy}"
    alone = fastest_alone(prediction)
    if alone is None:
        return f"{best.strategy} on {who}: no device alone holds the batch (`{words}`){batch}."
    gain = (alone.step_seconds or 0.0) / (best.step_seconds or 1.0)
    than = f"{gain:.2f} × as fast as {names_of([devices[alone.ranks[0]]])} alone"
    return f"{best.strategy} on {who}: {than} (`{words}`){batch}."


def fastest_alone(prediction: Prediction) -> PredictedRun | None:
    """Return the fastest row of a single device; `None` if there is none."""
    rows = [row for row in prediction.rows if row.predicted and len(row.ranks) == 1]
    return min(rows, key=lambda row: row.step_seconds or 0.0, default=None)


def names_of(devices: Sequence[DeviceSpec]) -> str:
    """Return the devices' names, equal ones counted: `the RTX 3090 and 2 × T4`."""
    counts = Counter(plain_name(device.name) for device in devices)
    names = [f"{count} × {name}" if count > 1 else f"the {name}" for name, count in counts.items()]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _larger_batch(prediction: Prediction) -> str:
    """Return the part of the sentence that says with which larger batch more devices pay."""
    paying, num_devices = prediction.paying, len(prediction.plan.devices)
    if paying is None:
        return f", with any batch up to {LARGEST_MULTIPLE * prediction.total:,} samples that fits"
    pay = f"{paying.num_devices} of {num_devices} devices"
    if paying.num_devices == num_devices:
        pay = "both devices" if num_devices == 2 else f"all {num_devices} devices"
    gain = f", {paying.gain:.2f} × as fast as the fastest alone" if paying.gain is not None else ""
    return f"; with `trainer.global_batch_size={paying.batch_size}` {pay} pay{gain}"
