"""What was measured of a job's devices before it: how long each works by itself, and what they exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel, Links, Work, step_seconds


@dataclass(frozen=True)
class DeviceCalibration:
    """One device by itself."""

    curve: SpeedCurve
    """Seconds of a step's own work; of an emulated device in modelled seconds, `time_scale` left out."""
    backward_share: float
    """Of a pass, the fraction that is backward, in which the exchange can hide."""
    spread: float
    """Standard deviation of single passes around the curve, as a fraction."""
    standard_error: float
    """Of the curve where it is least sure, as a fraction."""
    points: tuple[tuple[int, float], ...] = ()
    """What the curve was fitted to: samples of a pass, seconds."""

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
        """Read what `to_dict` returned.

        Raises:
            ValueError: it is not that.
        """
        try:
            points = tuple((int(size), float(seconds)) for size, seconds in raw["points"])
            numbers = {key: float(raw[key]) for key in ("backward_share", "spread", "standard_error")}
            return cls(SpeedCurve.from_dict(raw["curve"]), points=points, **numbers)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a device's calibration: {error}") from error


@dataclass(frozen=True)
class Exchange:
    """What leaves each device in a step, and what the step takes beside all that is modelled."""

    buckets: tuple[tuple[float, int], ...] = ()
    """In the order in which they leave: fraction of the last backward pass done by then, bytes."""
    measured: Channel | None = None
    """The group's exchange as measured between real devices; emulated ones have the catalogue's links."""
    data_seconds: float = 0.0
    """Of a step, waiting for samples to be loaded; a device alone waits for them, too."""
    other_seconds: float = 0.0
    """Of a joint step, beyond the devices' own work, the samples and the exchange that does not hide."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain types; `from_dict` reads them."""
        channel = self.measured
        return {
            "buckets": [list(bucket) for bucket in self.buckets],
            "measured": _told(channel) if channel is not None else None,
            "data_seconds": self.data_seconds,
            "other_seconds": self.other_seconds,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Exchange:
        """Read what `to_dict` returned."""
        channel = None
        if raw["measured"] is not None:
            latency, rate, *shared = raw["measured"]
            channel = Channel(float(latency), float(rate), bool(shared and shared[0]))
        buckets = tuple((float(fraction), int(num_bytes)) for fraction, num_bytes in raw["buckets"])
        return cls(buckets, channel, float(raw["data_seconds"]), float(raw["other_seconds"]))


def _told(channel: Channel) -> list[float | bool]:
    return [channel.latency_seconds, channel.bytes_per_second, channel.shared]


def joint_work(devices: Sequence[DeviceCalibration], counts: Sequence[int]) -> list[Work]:
    """Return every device's step with so many samples, as the cost model takes it."""
    return [
        device.curve.work(count, device.backward_share) for device, count in zip(devices, counts, strict=True)
    ]


def joint_seconds(
    devices: Sequence[DeviceCalibration], counts: Sequence[int], links: Links, exchange: Exchange
) -> float:
    """Return what a step of these devices with this split takes, waiting and exchange included."""
    work = joint_work(devices, counts)
    if len(devices) == 1:
        return devices[0].curve.seconds(counts[0]) + exchange.data_seconds
    joint = step_seconds(work, links, exchange.buckets)
    return joint + exchange.data_seconds + exchange.other_seconds
