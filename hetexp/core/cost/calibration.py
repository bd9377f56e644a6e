"""Measurements of a job's devices before it: the speed of each device alone, and their exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel, Links, step_seconds


@dataclass(frozen=True)
class DeviceCalibration:
    """The measurements of one device alone."""

    curve: SpeedCurve
    """Seconds of its own work; of an emulated device in modelled seconds, without `time_scale`."""
    backward_share: float
    """Fraction of a pass that is backward, which can hide the exchange."""
    spread: float
    """Standard deviation of single passes around the curve, as a fraction."""
    standard_error: float
    """Largest standard error of the curve, as a fraction."""
    points: tuple[tuple[int, float], ...] = ()
    """Measured points of the curve: samples of a pass, seconds."""

    def capped(self, most: int | None) -> DeviceCalibration:
        """Return the device with a further limit to its samples a step; `None` sets none."""
        limits = [limit for limit in (most, self.curve.cap) if limit is not None]
        return replace(self, curve=replace(self.curve, cap=min(limits))) if limits else self

    def split_microbatches(self, most: int | None) -> DeviceCalibration:
        """Return the device with a further limit to the samples of one pass; `None` sets none."""
        limits = [limit for limit in (most, self.curve.microbatch_size) if limit is not None]
        return replace(self, curve=replace(self.curve, microbatch_size=min(limits))) if limits else self

    def to_dict(self) -> dict[str, Any]:
        """Return plain types; `from_dict` reads them."""
        return {
            "curve": self.curve.to_dict(),
            "backward_share": self.backward_share,
            "spread": self.spread,
            "standard_error": self.standard_error,
            "points": [list(point) for point in self.points],
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DeviceCalibration:
        """Read the result of `to_dict`.

        Raises:
            ValueError: it is something else.
        """
        try:
            points = tuple((int(size), float(seconds)) for size, seconds in raw["points"])
            numbers = {key: float(raw[key]) for key in ("backward_share", "spread", "standard_error")}
            return cls(SpeedCurve.from_dict(raw["curve"]), points=points, **numbers)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a device's calibration: {error}") from error


@dataclass(frozen=True)
class Exchange:
    """The exchange of a step, and the parts of a step that the cost model does not predict."""

    buckets: tuple[tuple[float, int], ...] = ()
    """Gradient buckets in their order: fraction of the last backward pass done by then, bytes."""
    measured: Channel | None = None
    """The exchange as measured between real devices; emulated devices have the catalogue's links."""
    data_seconds: float = 0.0
    """Wait of a step for samples, also of a device alone."""
    other_seconds: float = 0.0
    """Rest of a joint step, beyond the devices' work, the samples and the exposed exchange."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain types; `from_dict` reads them."""
        measured: list[float | bool] | None = None
        if (channel := self.measured) is not None:
            measured = [channel.latency_seconds, channel.bytes_per_second, channel.shared]
        return {
            "buckets": [list(bucket) for bucket in self.buckets],
            "measured": measured,
            "data_seconds": self.data_seconds,
            "other_seconds": self.other_seconds,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Exchange:
        """Read the result of `to_dict`."""
        channel = None
        if raw["measured"] is not None:
            latency, rate, *shared = raw["measured"]
            channel = Channel(float(latency), float(rate), bool(shared and shared[0]))
        buckets = tuple((float(fraction), int(num_bytes)) for fraction, num_bytes in raw["buckets"])
        return cls(buckets, channel, float(raw["data_seconds"]), float(raw["other_seconds"]))


def joint_seconds(
    devices: Sequence[DeviceCalibration], counts: Sequence[int], links: Links, exchange: Exchange
) -> float:
    """Return the seconds of a step of these devices with this split, including waits and the exchange."""
    if len(devices) == 1:
        return devices[0].curve.seconds(counts[0]) + exchange.data_seconds
    pairs = zip(devices, counts, strict=True)
    work = [device.curve.work(count, device.backward_share) for device, count in pairs]
    joint = step_seconds(work, links, exchange.buckets)
    return joint + exchange.data_seconds + exchange.other_seconds
