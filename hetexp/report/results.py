"""The content of a report, as numbers.

Runs that differ in their seed only are one **variant**. Times and throughputs of paced runs are in the
devices' own, modelled time (wall-clock ÷ `time_scale`), since each run has its own scale. Every output marks
such runs as emulated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetexp.report.runs import RunRecord


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its confidence interval by Student's t; one seed alone gives no bounds."""

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Point:
    """One logged step of a run."""

    step: int
    samples: int
    seconds: float
    """Training time until this step, without evaluations and checkpoints; modelled if the run is paced."""
    train_loss: float | None
    eval_loss: float | None
    shares: dict[str, float]
    """By device id."""
    device_speeds: dict[str, float] = field(default_factory=dict)
    """Samples a second of each device while it computed, by its id."""
    device_train_losses: dict[str, float] = field(default_factory=dict)
    """By device id, if each device takes its own steps."""
    device_eval_losses: dict[str, float] = field(default_factory=dict)
    """By device id, if each device trains its own model; `eval_loss` is then their mean by share."""


@dataclass(frozen=True)
class Variant:
    """Runs that differ in their seed only."""

    label: str
    """The settings in which the variants differ, short enough for a chart."""
    settings: dict[str, str]
    """Those settings by key."""
    runs: tuple[RunRecord, ...]
    """Completed runs, by seed."""
    emulated: bool
    valid: bool
    """False if this machine was too slow to emulate the devices in all of the runs. If some runs are valid,
    the speeds are of these alone."""
    invalid_reason: str | None
    """Reasons of the invalid runs."""
    fallback: str | None
    """Requested strategy and the strategy that ran instead."""
    num_devices: int
    samples_per_second: Interval | None
    step_seconds: Interval | None
    predicted_step_seconds: float | None
    efficiency: Interval | None
    ceiling: float | None
    lost_to: dict[str, float] | None
    """Means over seeds; with the efficiency they sum to 1."""
    train_loss: Interval | None
    """Of the last log lines, without diverged runs, as in `eval_loss`."""
    eval_loss: Interval | None
    gain_over_equal: Interval | None
    """Throughput ÷ that of `balancing=equal` with the same other settings and seed; a geometric mean."""
    gain_over_single: Interval | None
    """Throughput ÷ that of the fastest device alone with the same seed; a geometric mean."""
    joules_per_sample: Interval | None
    energy_source: str | None
    bytes_per_step: float | None
    exact: bool = True
    """Whether its steps are those of one device; else its loss curve differs."""
    num_diverged: int = 0
    """Runs whose last loss is not finite."""
    num_invalid: int = 0
    single_device: str | None = None
    """The fastest device alone, the baseline of `gain_over_single`."""
    single_samples_per_second: float | None = None
    single_source: str | None = None
    """Source of that speed: runs of the device alone, a calibration, or its own work during runs."""
    devices: tuple[str, ...] = ()
    """Device names of the run with the most devices."""
    device_speeds: dict[str, float] = field(default_factory=dict)
    """Samples a second of each device while it computed, by id and name; the mean over the runs."""
    total_samples: float | None = None
    """Samples that a run trained on, the mean over the runs."""

    @property
    def speed(self) -> float:
        """Mean samples a second; 0 if they are not known."""
        return self.samples_per_second.mean if self.samples_per_second is not None else 0.0

    @property
    def can_be_best(self) -> bool:
        """Whether it is valid, ran as requested, and none of its losses diverged."""
        as_requested = self.valid and self.fallback is None and not self.num_diverged
        return as_requested and self.samples_per_second is not None


@dataclass(frozen=True)
class CurvePoint:
    """One split of the weights curve."""

    share: float
    """Share of the curve's device, as trained."""
    samples_per_second: Interval
    label: str


@dataclass(frozen=True)
class WeightsCurve:
    """Throughput over the share of one of two devices, from runs that differ in their split."""

    device: str
    """The device whose share is the axis."""
    points: tuple[CurvePoint, ...]
    """By share; splits that policies chose are included."""
    optimum_share: float
    """Share of the fastest point. It is not interpolated: at its optimum the curve has a kink."""
    optimum_samples_per_second: float
    predicted: tuple[tuple[float, float], ...]
    """(share, samples a second) by the cost model; empty if it lacks figures of the devices."""
    predicted_optimum_share: float | None
    other_device: str = ""
    strategy: str = ""
    predicted_source: str | None = None
    """Source of the cost model's figures."""


@dataclass(frozen=True)
class DeviceProfile:
    """A device's calibration: its seconds over the number of samples."""

    device: str
    emulated: bool
    samples: tuple[int, ...]
    seconds: tuple[float, ...]
    """Measured seconds of forward and backward, in the device's own time."""
    fixed_seconds: float
    """The fitted line's seconds at 0 samples."""
    seconds_per_sample: float
    relative_speed: float
    """Speed with the whole global batch ÷ that of the fastest device."""
    samples_per_second: float = 0.0
    """Speed alone with the whole global batch, update included."""
    fault: str | None = None
    """Faults that were ordered for it."""


@dataclass(frozen=True)
class Comparison:
    """The content of a report."""

    title: str
    keys: tuple[str, ...]
    """Settings in which the variants differ."""
    variants: tuple[Variant, ...]
    """Valid variants first, each group by speed."""
    failed: tuple[RunRecord, ...]
    """Runs that did not complete."""
    best: Variant | None
    """The fastest valid variant that ran as requested and has finite losses. Variants whose steps are those
    of one device take precedence."""
    single_samples_per_second: float | None
    """Speed of the fastest device alone, the baseline of `best`."""
    single_source: str | None
    """Source of that speed: runs of the device alone, or a calibration."""
    emulated: bool
    common: dict[str, str]
    """Settings that all runs share: group options, and typed keys."""
    curve: WeightsCurve | None = None
    """The weights curve, if runs of two devices differ in their split."""
    profiles: tuple[DeviceProfile, ...] = ()
    """Calibrations of the devices before the runs."""
    notes: tuple[str, ...] = ()
    """Warnings for the reader: missing seeds, several versions, several time scales …"""
    answer: str = ""
    """The comparison in a few sentences."""

    @property
    def runs(self) -> list[RunRecord]:
        """Completed runs of all variants."""
        return [run for variant in self.variants for run in variant.runs]
