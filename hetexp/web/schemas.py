"""The models of requests and answers, from which OpenAPI is generated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

State = Literal["pending", "running", "completed", "failed", "stopped"]
DeviceId = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-z]+(:[A-Za-z0-9_]+)?$")]
GpuIds = Annotated[list[DeviceId], Field(min_length=1, max_length=64)]
Overrides = Annotated[
    dict[Annotated[str, Field(max_length=64)], JsonValue],
    Field(max_length=64, description="key → value, of those that GET /api/v1/options lists"),
]
Option = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class NewTraining(_Asked):
    """A training to start."""

    experiment: Option | None = None
    overrides: Overrides = {}
    gpu_ids: GpuIds


class Question(_Asked):
    """A request for the prediction of a step on some devices."""

    model: Option | None = None
    data: Option | None = None
    experiment: Option | None = None
    overrides: Overrides = {}
    gpu_ids: GpuIds


class Problem(BaseModel):
    """One problem of a request."""

    key: str | None
    message: str


class Problems(BaseModel):
    """The problems of a refused request."""

    detail: list[Problem]


class User(BaseModel):
    """The run and rank that use a device."""

    run: str
    rank: int | None


class Device(BaseModel):
    """A device and its newest sample; unknown values are null."""

    id: str
    """As the device's machine calls it: other machines may have devices of the same id."""
    key: str
    """Unique among the devices of all machines."""
    host: str
    here: bool
    """Whether it is in the server's machine; only such a device can be selected."""
    name: str
    vendor: str
    backend: str
    index: int | None
    environment: str | None
    emulated: bool
    integrated: bool
    lost: bool
    state: str
    reason: str | None
    selectable: bool
    run: str | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    memory_free_bytes: int | None
    utilisation: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    clock_mhz: float | None
    memory_clock_mhz: float | None
    throttle: list[str] | None
    fan: float | None
    busy: bool
    busy_by: User | None
    time: float | None
    stale: bool
    """Whether no new samples come: its machine may be off, or cut off."""
    age_seconds: float
    """Age of the newest sample."""


class Devices(BaseModel):
    """All devices of this machine, and of the others that use its database."""

    devices: list[Device]


Values = list[float | None]


class Line(BaseModel):
    """Samples over time of one device, or of all together (`device` is null)."""

    device: str | None
    host: str | None
    key: str | None
    name: str | None
    run: str | None
    time: list[float]
    utilisation: Values
    memory_used_bytes: Values
    memory_total_bytes: Values
    temperature_c: Values
    power_w: Values
    clock_mhz: Values
    fan: Values


class History(BaseModel):
    """Samples over time."""

    view: Literal["aggregated", "per_gpu"]
    since: float
    series: list[Line]


class Card(BaseModel):
    """A card that can be emulated."""

    id: str
    name: str
    vendor: str
    memory_total_bytes: int
    tflops: float | None


class Key(BaseModel):
    """A key that a request may set."""

    key: str
    kind: Literal["int", "float", "bool", "choice", "text", "ints", "floats"]
    description: str
    minimum: float | None = None
    maximum: float | None = None
    choices: list[str] | None = None
    nullable: bool = False


class Options(BaseModel):
    """The choices of a request, and their defaults."""

    experiments: list[str]
    models: list[str]
    strategies: list[str]
    policies: list[str]
    data: list[str]
    emulated_cards: list[Card]
    allowed_overrides: list[Key]
    defaults: dict[str, Any]
    token_required: bool


class DeviceEstimate(BaseModel):
    """One device's part of a step."""

    id: str
    device: str
    name: str
    local_batch_size: int
    micro_batch_size: int
    memory_bytes: int | None
    memory_total_bytes: int | None
    fits: bool | None


class Estimate(BaseModel):
    """The prediction of a step."""

    effective_batch_size: int
    per_device: list[DeviceEstimate]
    recommended: list[str]
    predicted_step_seconds: float | None
    problem: str | None
    notes: list[str]


class Share(BaseModel):
    """A device's part of the work."""

    id: str
    share: float | None


class Training(BaseModel):
    """A training."""

    id: str
    name: str
    state: State
    gpu_ids: list[str]
    distributed: bool
    emulated: bool
    strategy: str
    balancing: str | None
    progress: float | None
    step: int | None
    steps: int | None
    loss: float | None
    samples_per_second: float | None
    efficiency: float | None
    split: list[Share]
    error: str | None
    host: str
    run_dir: str
    report_url: str | None
    created: float
    started: float | None
    ended: float | None
    waits_for: list[str]
    stopping: bool
    experiment: str | None
    overrides: dict[str, Any]


class TrainingWithLog(Training):
    """A training with the end of its log."""

    log_tail: list[str]


class Trainings(BaseModel):
    """Trainings, the newest first."""

    trainings: list[Training]


class Rows(BaseModel):
    """Lines of a run's log."""

    rows: list[dict[str, Any]]


class Session(BaseModel):
    """Whether the server needs a token."""

    token_required: bool
