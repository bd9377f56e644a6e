"""What a report shows, as numbers.

Runs that differ in their seed only are one **variant**. Times and throughputs of paced runs are in the
devices' own, modelled time (wall-clock ÷ `time_scale`), since every run keeps a scale of its own; such runs
are marked emulated wherever they are shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetexp.report.runs import RunRecord


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its confidence interval by Student's t; without bounds from one seed alone."""

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
    """Training time until then, evaluations and checkpoints left out; modelled if the run is paced."""
    train_loss: float | None
    eval_loss: float | None
    shares: dict[str, float]
    """By device id."""
    device_speeds: dict[str, float] = field(default_factory=dict)
    """Samples a second of each device while it computed, by its id."""
    device_train_losses: dict[str, float] = field(default_factory=dict)
    """By device id, if each takes steps of its own."""
    device_eval_losses: dict[str, float] = field(default_factory=dict)
    """By device id, if each trains a model of its own; `eval_loss` is their mean by share then."""


@dataclass(frozen=True)
class Variant:
    """Runs that differ in their seed only."""

    label: str
    """The settings in which the variants differ, short enough for a chart."""
    settings: dict[str, str]
    """Those settings by key."""
    runs: tuple[RunRecord, ...]
    """Completed ones, by seed."""
    emulated: bool
    valid: bool
    """False if this machine was too slow for all of the runs: their speeds are no model's. Of a variant
    with valid runs the speeds are of these alone."""
    invalid_reason: str | None
    """Of the runs that are not valid."""
    fallback: str | None
    """What ran instead of what was asked for."""
    num_devices: int
    samples_per_second: Interval | None
    step_seconds: Interval | None
    predicted_step_seconds: float | None
    efficiency: Interval | None
    ceiling: float | None
    lost_to: dict[str, float] | None
    """Means over seeds; with the efficiency they sum to 1."""
    train_loss: Interval | None
    """Of the last log lines; runs that diverged left out, as in `eval_loss`."""
    eval_loss: Interval | None
    gain_over_equal: Interval | None
    """Throughput ÷ that of `balancing=equal` with the same other settings and seed; a geometric mean."""
    gain_over_single: Interval | None
    """Throughput ÷ that of the fastest device alone with the same seed; a geometric mean."""
    joules_per_sample: Interval | None
    energy_source: str | None
    bytes_per_step: float | None
    exact: bool = True
    """Whether its steps are those of one device; else its loss curve is another one."""
    num_diverged: int = 0
    """Runs whose last loss is not finite."""
    num_invalid: int = 0
    single_device: str | None = None
    """The fastest device alone, which `gain_over_single` compares with."""
    single_samples_per_second: float | None = None
    single_source: str | None = None
    """Where that is known from: runs of it alone, a calibration, or its own work during runs."""
    devices: tuple[str, ...] = ()
    """Names, of the run with the most devices."""
    device_speeds: dict[str, float] = field(default_factory=dict)
    """Samples a second of each device while it computed in the runs, the mean over them; by id and name."""
    total_samples: float | None = None
    """That a run trained on, the mean."""

    @property
    def speed(self) -> float:
        """Mean samples a second; 0 if they are not known."""
        return self.samples_per_second.mean if self.samples_per_second is not None else 0.0

    @property
    def can_be_best(self) -> bool:
        """Whether it is valid, ran as asked for, and none of its losses diverged."""
        as_asked = self.valid and self.fallback is None and not self.num_diverged
        return as_asked and self.samples_per_second is not None


@dataclass(frozen=True)
class CurvePoint:
    """One split of the weights curve."""

    share: float
    """Of the curve's device, as trained."""
    samples_per_second: Interval
    label: str


@dataclass(frozen=True)
class WeightsCurve:
    """Throughput over the share of one of two devices, from runs that differ in their split."""

    device: str
    """Whose share is the axis."""
    points: tuple[CurvePoint, ...]
    """By share; policies that found a split of their own included."""
    optimum_share: float
    """Of the fastest of the points: between points the curve has a kink, through which no parabola goes."""
    optimum_samples_per_second: float
    predicted: tuple[tuple[float, float], ...]
    """(share, samples a second) by the cost model; empty if it knows too little of the devices."""
    predicted_optimum_share: float | None
    other_device: str = ""
    strategy: str = ""
    predicted_source: str | None = None
    """Where the cost model has its figures from."""


@dataclass(frozen=True)
class DeviceProfile:
    """What calibration measured of a device: its seconds over the samples that it is given."""

    device: str
    emulated: bool
    samples: tuple[int, ...]
    seconds: tuple[float, ...]
    """Measured, of forward and backward; in the device's own time."""
    fixed_seconds: float
    """Of the fitted line."""
    seconds_per_sample: float
    relative_speed: float
    """Of the fastest device's speed at a full share: 1 for that one."""
    samples_per_second: float = 0.0
    """Alone with the whole global batch, update included."""
    fault: str | None = None
    """What was ordered to happen to it."""


@dataclass(frozen=True)
class Comparison:
    """All that a report shows."""

    title: str
    keys: tuple[str, ...]
    """Settings in which the variants differ."""
    variants: tuple[Variant, ...]
    """Valid ones first, the fastest of each first."""
    failed: tuple[RunRecord, ...]
    """Everything that did not complete."""
    best: Variant | None
    """The fastest of the valid ones that keep to what was asked for and whose loss is finite; if there are
    some whose steps are those of one device, of these."""
    single_samples_per_second: float | None
    """Of the fastest device alone that `best` is compared with."""
    single_source: str | None
    """Where that comes from: runs of it alone, or a calibration."""
    emulated: bool
    common: dict[str, str]
    """Settings that all runs share: group options, and what was typed."""
    curve: WeightsCurve | None = None
    """Where the runs are of two devices and differ in their split."""
    profiles: tuple[DeviceProfile, ...] = ()
    """What was measured of the devices before the runs; empty if nothing was."""
    notes: tuple[str, ...] = ()
    """What a reader must know: missing seeds, several versions, paced runs of several scales …"""
    answer: str = ""
    """The comparison in a sentence or two."""

    @property
    def runs(self) -> list[RunRecord]:
        """Completed runs of all variants."""
        return [run for variant in self.variants for run in variant.runs]
