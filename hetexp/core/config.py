"""The typed configuration. Hydra composes it, `read_config` checks it: every problem at once, by key.

Choices of one section live in a pydantic model below. Sections that name a class by `_target_`
(`strategy`, `balancing`, `model`, `data`, `optimizer`, `logger`) are checked against that class's own
signature by `hetexp.core.instantiate`, so that a person's class needs no schema of its own.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from hetexp.core.cluster import ClusterConfig, cluster_problems
from hetexp.core.cost.step import Wire
from hetexp.core.errors import ConfigError, did_you_mean, how_to_write, must_be
from hetexp.core.precision import long_name
from hetexp.core.section import Section
from hetexp.core.sweep.folder import name_problem

COMPONENTS = ("strategy", "balancing", "model", "data", "optimizer", "logger")
"""Sections built by `_target_`."""

Vendor = Literal["nvidia", "intel", "amd", "apple", "cpu"]
Component = dict[str, Any]


class DeviceEntry(Section):
    """One line of `hardware.devices`: a device by name, or every card of a vendor."""

    device: str | None = None
    """`auto`, `cpu`, `cpu:1`, `cuda:0` or `emulated:<card>`; a plain string in the list means this key."""
    vendor: Vendor | None = None
    """Every card of this vendor in the machine; `cpu` means the machine's own."""
    match: str | None = None
    """Only the vendor's cards whose name has these words: `A100`, `RTX 4090`."""
    emulate_as: str | None = None
    """Card that stands in where no such card is found (see `hardware.missing`)."""
    efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of its peak that the emulated card reaches, instead of the catalogue's assumption."""
    overhead_seconds: PositiveFloat | None = None
    """Fixed cost of a pass, and of an update, on the emulated card, likewise."""
    count: PositiveInt | None = None
    """How many: ranks on the CPU, emulated cards, or at most this many of the vendor's cards that no entry
    before has taken."""
    python: str | None = None
    """Interpreter that drives this device; by default the one that runs the launcher."""
    slow: Annotated[float, Field(ge=1)] | None = None
    """Makes the device, a real one too, so many times slower than it is."""
    memory_gib: PositiveFloat | None = None
    """Memory that the device, a real one too, may use, instead of all that it has."""
    host: str | None = None
    """Machine that an emulated device is in, for mixes over several; see `hardware.network`."""

    @field_validator("match", "emulate_as", mode="before")
    @classmethod
    def _numbers_are_names(cls, value: Any) -> Any:
        """YAML and the command line read `6600` as a number; here it is a card's name."""
        return str(value) if type(value) is int else value


class HardwareConfig(Section):
    """Which devices take part: `devices` or `cards`, one of them."""

    catalogue: str | None = None
    """A person's own YAML file of cards and links, laid over the shipped ones."""
    cards: Annotated[list[str], Field(min_length=1)] | None = None
    """A mix by card names: each the real card where it is found, the emulated one where none of them is."""
    devices: list[DeviceEntry] = []
    gpu_ids: int | str | list[int | str] | None = None
    """Cards by number, `cuda:0`, UUID or PCI address, or `all`, `available`, `recommend:2`, in place of
    `devices: [auto]` (see `hetexp.hardware.selection.request`)."""
    cuda_ids: int | str | list[int | str] | None = None
    """An older name of `gpu_ids`."""
    default_gpu_selection: Literal["all", "available", "manual"] = "available"
    """What `auto` takes: every usable card, those that are not in use, or none without `gpu_ids`."""
    multi_gpu_enabled: bool = True
    """Whether several cards may take part; else one does."""
    share_devices: bool = False
    """Whether a card may be one that others use, and several ranks' at once."""
    busy_memory_mib: NonNegativeFloat = 256.0
    """Memory from which on another process that computes on a card makes it busy."""
    max_temperature_celsius: PositiveFloat = 90.0
    """A card that is hotter is not chosen."""
    power_budget_watts: PositiveFloat | None = None
    """Most that the power limits of all chosen cards may add up to."""
    device_power_watts: PositiveFloat | None = None
    """Highest power limit that a chosen card may have."""
    check_memory: bool = True
    """Whether memory is estimated (the data set is built once more for it) and what does not fit refused."""
    missing: Literal["auto", "emulate", "emulate_all", "error", "drop"] = "auto"
    """What to do when a vendor of the mix is absent: `auto` emulates only if all of them are, `emulate` the
    absent ones beside the real cards, `emulate_all` the whole mix."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank; by default all ranks of the host share its cores, and a card's rank takes at
    most four."""
    time_scale: PositiveFloat | None = None
    """Emulated seconds take this many real ones; by default the smallest that this machine can keep."""
    efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of its peak that each emulated card reaches whose entry says nothing else; `null`: the
    catalogue's assumption, which is that of a large model."""
    overhead_seconds: PositiveFloat | None = None
    """Fixed cost of a pass, and of an update, likewise."""
    network: str = "ethernet_10g"
    """Link of the catalogue between the hosts of emulated devices."""
    deviation_seed: NonNegativeInt | None = None
    """Makes emulated cards differ from their figures in a way that only measuring finds out."""

    @field_validator("cards", mode="before")
    @classmethod
    def _one_card(cls, value: Any) -> Any:
        """`t4` means `[t4]`, and a number in the list is a name (`6600`)."""
        entries = [value] if isinstance(value, (str, int)) else value
        if not isinstance(entries, list):
            return entries
        return [str(entry) if type(entry) is int else entry for entry in entries]

    @field_validator("devices", mode="before")
    @classmethod
    def _short_forms(cls, value: Any, info: ValidationInfo) -> Any:
        """`cpu` means `[cpu]`, and a string in the list means `{device: …}`; `cards` may stand instead."""
        if value is None and info.data.get("cards", "wrong, and reported") is not None:
            return []
        entries = [value] if isinstance(value, (str, dict)) else value
        if not isinstance(entries, list):
            return entries
        if not entries:
            raise PydanticCustomError("too_short", "a list with at least one entry")
        return [{"device": entry} if isinstance(entry, str) else entry for entry in entries]


class EarlyStoppingConfig(Section):
    """When all ranks stop together before the last step."""

    patience: PositiveInt | None = None
    """Evaluations without improvement before all ranks stop together; `null` never stops early."""
    metric: Literal["loss", "accuracy"] = "loss"
    min_delta: NonNegativeFloat = 0.0


class TrainerConfig(Section):
    """The training itself, the same whatever the devices."""

    batch_size_per_device: PositiveInt | None = None
    """Instead of `global_batch_size`, which is then this × the number of chosen devices, before anything is
    planned (`for_devices`); policies share that out as any other."""
    global_batch_size: PositiveInt
    """Samples of one optimizer step, over all ranks."""
    max_steps: PositiveInt | None = None
    max_epochs: PositiveInt | None = None
    accumulate: PositiveInt = 1
    """Microbatches that each rank splits its local batch into."""
    microbatch_size: PositiveInt | None = None
    """Most samples of one forward pass, instead of `accumulate`; ranks then differ in their number."""
    clip_norm: PositiveFloat | None = None
    activation_checkpointing: bool = False
    """Whether the model's layers compute their activations again in backward instead of keeping them."""
    compile: bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        False
    )
    """Whether `torch.compile` compiles the model, or in which of its modes."""
    precision: Literal["auto", "auto_common", "float32", "bfloat16", "float16", "float64"] = "float32"
    """What the devices compute in (`hetexp.core.precision`); `fp32`, `bf16`, `fp16`, `fp64` mean the same."""
    non_finite: Literal["stop", "skip", "continue"] = "stop"
    """What becomes of a step whose gradient is not finite, where no smaller loss scale would help: `stop` the
    run before its weights are harmed, `skip` the step on all ranks, `continue` without looking."""
    loss: str = "cross_entropy"
    """`cross_entropy`, `mse`, `reconstruction`, or a class's dotted path (see `hetexp.training.loss`)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate over the optimizer steps of the whole run, after `warmup_steps`."""
    warmup_steps: NonNegativeInt = 0
    eval_every: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    checkpoint_every: NonNegativeInt = 0
    """Steps between checkpoints; 0: by `checkpoint_minutes` and at the end only."""
    checkpoint_minutes: NonNegativeFloat = 10
    """Longest time without a checkpoint, by rank 0's clock; 0: none is written for that."""
    checkpoint_in_background: bool = True
    """Whether a checkpoint is written while the training goes on, off a copy in the host's memory."""
    keep_last: NonNegativeInt = 0
    """How many of the newest checkpoints stay; 0: all, but of those by `checkpoint_minutes` two."""
    keep_best: NonNegativeInt = 1
    """How many stay beside them: the best by `early_stopping.metric`, of those evaluated at their step."""
    on_save_error: Literal["warn", "stop"] = "warn"
    """What becomes of the run where a checkpoint before the last one cannot be written."""
    on_request: dict[str, str] = {}
    """What answers to `hetexp control RUN NAME`, by name: dotted paths of functions that take an
    `hetexp.training.recovery.rank_commands.Asked`."""
    log_every: PositiveInt = 10
    check_sync_every: NonNegativeInt = 0
    """Steps between comparisons of all ranks' replicas (`hetexp.training.replicas`); 0: none."""
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    drop_last: bool = False
    num_workers: NonNegativeInt = 0
    """Data loader processes a rank, which live as long as the run."""
    prefetch_factor: PositiveInt = 2
    """Microbatches that each of them loads ahead."""
    fast_dev_run: NonNegativeInt = 0
    """Train and evaluate this many batches (`true` = 1) and write no checkpoint."""
    overfit_batches: NonNegativeInt = 0
    """Use only the first so many global batches, in the same order every epoch."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @field_validator("global_batch_size", mode="before")
    @classmethod
    def _of_one_device(cls, value: Any, info: ValidationInfo) -> Any:
        """Stand for one device until the devices are known."""
        return info.data.get("batch_size_per_device") if value is None else value

    @field_validator("precision", mode="before")
    @classmethod
    def _short_precisions(cls, value: Any) -> Any:
        return long_name(value)

    @field_validator("fast_dev_run", mode="before")
    @classmethod
    def _true_is_one(cls, value: Any) -> Any:
        return int(value) if isinstance(value, bool) else value


def variables(raw: Any) -> Any:
    """Return environment variables as texts: numbers as they are written, `true` and `false` as 1 and 0."""
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        return raw
    numbers = {name: value for name, value in raw.items() if isinstance(value, (int, float))}
    texts = {n: str(int(value) if isinstance(value, bool) else value) for n, value in numbers.items()}
    return {**raw, **texts}


class CommConfig(Section):
    """How ranks exchange gradients."""

    backend: Literal["auto", "native", "shm", "gloo"] = "auto"
    """`native` is the vendor's own library (NCCL), `shm` memory that the ranks of a host share, `gloo` goes
    over TCP; `auto` takes what fits where the devices are (`hetexp.plan.routes`)."""
    wire: Wire = "float32"
    """What gradients travel as, with error feedback; float32 means as they are."""
    boundary_wire: Wire = "float32"
    """What activations and their gradients travel as between the stages of a pipeline; float32 means as they
    are. There is no error feedback."""
    env: dict[str, str] | None = None
    """Variables for the environment of every rank, such as `NCCL_P2P_DISABLE`."""
    timeout_seconds: PositiveFloat = 300.0
    """Longest wait in a collective."""
    self_test_seconds: PositiveFloat = 20.0
    """Longest that what carries the exchange may take to form and to sum known values, before training."""

    @field_validator("env", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        """YAML reads `1` and `true` as what they look like; a variable is text."""
        return None if value is None else variables(value)


class LaunchConfig(Section):
    """How ranks are started and ended."""

    start_method: Literal["subprocess", "forkserver"] = "subprocess"
    """`forkserver` forks ranks from a process that has imported torch: quick, one interpreter only."""
    timeout_seconds: PositiveFloat = 120.0
    """Longest wait for all ranks to have started and agreed."""
    grace_seconds: PositiveFloat = 3.0
    """Time that ranks get to end by themselves before they are killed."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the store; 0 takes a free one."""


class SweepConfig(Section):
    """How the runs of a sweep (`-m`) belong together; nothing of it changes what one of them computes."""

    name: str | None = None
    """Folder below `outputs/sweeps`; `None`: a new one. A sweep that is there already is continued."""
    report: bool = True
    """Whether the runs are compared at the end."""
    wait_seconds: NonNegativeFloat | None = None
    """Longest wait for a device that another run holds; `None`: as long as it takes."""
    share_cpu: bool = False
    """Whether jobs at the same time may compute on the CPU together, emulated devices included."""

    @field_validator("name", mode="before")
    @classmethod
    def _below_outputs(cls, value: Any) -> Any:
        value = str(value) if type(value) is int else value
        problem = name_problem(value) if value is not None else ""
        if problem:
            raise PydanticCustomError("sweep_name", "{problem}", {"problem": problem})
        return value


class DebugConfig(Section):
    """Switches for finding out, not for training."""

    normalizer: Literal["global", "per_rank"] = "global"
    """`per_rank` divides by each rank's own count, as plain DDP does: wrong on unequal shares, to compare."""
    detect_anomaly: bool = False
    dropout: bool = True
    """`false` sets every dropout of the model to 0 (`hetexp.model.dropout`), so that runs can be compared."""
    exchange: bool = True
    """`false` leaves the exchange of gradients out, and weights grow apart: what a step takes without it."""


class FaultEvent(Section):
    """One thing that is made to happen to one device."""

    kind: Literal[
        "slow",
        "thermal",
        "jitter",
        "stall",
        "death",
        "segfault",
        "freeze",
        "hang",
        "comms",
        "device_error",
        "oom",
    ]
    """Slower by `factor`; slower bit by bit; each step by chance up to `factor` times slower; silent for
    `seconds`; killed; killed by a wrong address; stopped as by SIGSTOP; in a step that never ends; without
    its connections to other ranks; an error of the device as its driver reports it; out of memory."""
    device: str
    """Id of the device in the plan: `emulated:0`, `cuda:1`."""
    at_step: NonNegativeInt | None = None
    at_seconds: NonNegativeFloat | None = None
    """Since the first step, instead of `at_step`."""
    until_step: PositiveInt | None = None
    """First step in which a slow-down is over; `null`: never."""
    factor: Annotated[float, Field(ge=1)] = 2.0
    warm_up: PositiveFloat = 20.0
    """Steps (or seconds) after which a thermal slow-down is two thirds there."""
    seconds: PositiveFloat = 5.0
    """How long a stall lasts."""


class FaultConfig(Section):
    """What becomes of a run whose devices fail, and faults to inject; without these in a real training."""

    events: list[FaultEvent] = []
    survive: bool = True
    """Whether a run goes on without a device that is lost; `false`: it ends, and says why."""
    min_devices: PositiveInt = 1
    """Fewest devices that it goes on with."""
    heartbeat_seconds: PositiveFloat = 1.0
    """Longest silence of a rank that does not compute either, before it counts as lost."""
    respawn: NonNegativeInt = 2
    """How often a lost device is started again."""
    respawn_seconds: PositiveFloat = 2.0
    """Pause before the first time; it doubles each time."""
    stop_seconds: PositiveFloat = 30.0
    """Longest that the last checkpoint may take once the run is asked to end."""


class RetentionConfig(Section):
    """How long samples are kept; the older, the coarser."""

    raw_hours: PositiveFloat = 1.0
    """As they were taken; then as means of 10 seconds."""
    ten_seconds_days: PositiveFloat = 1.0
    """Since they were taken; then as means of a minute."""
    minutes_days: PositiveFloat = 30.0
    """Likewise; then they are gone."""


class MonitorConfig(Section):
    """Samples of what the devices do (`hetexp.monitor`)."""

    enabled: bool = True
    """Whether a run is followed, where the extra `monitor` is installed."""
    interval_seconds: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    view: Literal["aggregated", "per_gpu"] = "aggregated"
    """What `hetexp top` begins with: all devices together, or each of them."""
    url: str | None = None
    """Of the database; `None`: a file of SQLite in `$HETEXP_HOME`."""
    retention: RetentionConfig = RetentionConfig()

    @field_validator("url")
    @classmethod
    def _known_without_password(cls, value: str | None) -> str | None:
        problem = _url_problem(value) if value is not None else None
        if problem is not None:
            raise PydanticCustomError("monitor_url", "{problem}", {"problem": problem})
        return value


def _url_problem(url: str) -> str | None:
    """Return what a database's URL must be instead, `None` where it can be used."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite" and parts.netloc == "" and len(parts.path) > 1:
        return None
    if parts.scheme not in ("postgresql", "postgresql+psycopg") or len(parts.path) < 2:
        return "sqlite:///FILE (four slashes before an absolute path) or postgresql://USER@HOST/DATABASE"
    if parts.password is not None or "password=" in parts.query:
        return "without a password, as every run keeps its configuration (~/.pgpass and PGPASSWORD give it)"
    return None


class Config(Section):
    """A whole run, as `conf/config.yaml` composes it."""

    hardware: HardwareConfig
    strategy: Component
    balancing: Component
    model: Component
    data: Component
    optimizer: Component
    logger: Component
    trainer: TrainerConfig
    comm: CommConfig = CommConfig()
    launch: LaunchConfig = LaunchConfig()
    sweep: SweepConfig = SweepConfig()
    debug: DebugConfig = DebugConfig()
    fault: FaultConfig = FaultConfig()
    monitor: MonitorConfig = MonitorConfig()
    cluster: ClusterConfig = ClusterConfig()
    node: str | None = None
    """Which of `cluster.hosts` this machine is, where neither its name nor an address of it tells."""
    fallback: Literal["single"] | None = None
    """What to do where the strategy cannot run, written `strategy.fallback`; `None`: say why, and end."""
    plan_only: bool = False
    """Whether to print what would come of it (`hetexp.plan.predict.runs`), and start nothing."""
    diagram: bool = True
    """Whether the plan is drawn into the run folder (`hetexp.report.diagram.files`)."""
    resume: str | None = None
    """A checkpoint's folder, a run's (`RUN`, `RUN/best`, `RUN/step:100`), or `auto`, `last`, `best`,
    `step:100` of a run of the same job (`hetexp.launch.resume`)."""
    name: str | None = None
    """Name of the run for people; by default made from the overrides."""


def read_config(raw: dict[str, Any]) -> Config:
    """Return the typed configuration.

    Args:
        raw: resolved plain types, as `OmegaConf.to_container(cfg, resolve=True)` gives.

    Raises:
        ConfigError: every wrong key, type and value, and every clash between two of them.
    """
    config, problems = check_config(raw)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def check_config(raw: dict[str, Any]) -> tuple[Config | None, list[str]]:
    """Return the typed configuration (`None` where it cannot be built) and all problems found."""
    plain, wrong = _fallback_apart(raw)
    try:
        # Strict JSON mode: a list may become a tuple, but neither "8" nor true becomes a number.
        config = Config.model_validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        return None, wrong + explain(error, plain)
    return config, wrong + _batch_clash(raw["trainer"]) + _clashes(config)


def own_arguments(section: str, node: Any) -> Any:
    """Return a section without what hetexp itself reads there, which is no argument of the class it names."""
    if section != "strategy" or not isinstance(node, dict):
        return node
    return {name: value for name, value in node.items() if name != "fallback"}


def _fallback_apart(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration with `strategy.fallback` in a place of its own, and what is wrong with it."""
    strategy = raw.get("strategy")
    if not isinstance(strategy, dict) or "fallback" not in strategy:
        return raw, []
    wanted = strategy["fallback"]
    known = wanted in (None, "single")
    problems = [] if known else [must_be("strategy.fallback", "single or null", wanted)]
    apart = {"strategy": own_arguments("strategy", strategy), "fallback": wanted if known else None}
    return raw | apart, problems


def for_devices(config: Config, raw: dict[str, Any], count: int) -> tuple[Config, dict[str, Any]]:
    """Return both forms of the configuration with one global batch, whatever the person gave.

    Args:
        count: devices that take part.
    """
    each = config.trainer.batch_size_per_device
    if each is None:
        return config, raw
    batch = {"batch_size_per_device": None, "global_batch_size": each * count}
    trainer = config.trainer.model_copy(update=batch)
    return config.model_copy(update={"trainer": trainer}), {**raw, "trainer": {**raw["trainer"], **batch}}


def _batch_clash(trainer: dict[str, Any]) -> list[str]:
    if trainer.get("batch_size_per_device") is None or trainer["global_batch_size"] is None:
        return []
    fix = "Both give the batch: keep one of them."
    accepted = "null where `trainer.batch_size_per_device` is set"
    return [must_be("trainer.global_batch_size", accepted, trainer["global_batch_size"], fix)]


def _clashes(config: Config) -> list[str]:
    """Values that are fine alone and wrong together."""
    trainer = config.trainer
    problems = []
    if trainer.max_steps is None and trainer.max_epochs is None and not trainer.fast_dev_run:
        problems.append("`trainer.max_steps` or `trainer.max_epochs` must be given, but both are null.")
    if trainer.microbatch_size is not None and trainer.accumulate > 1:
        problems.append(
            must_be(
                "trainer.accumulate",
                "1 where `trainer.microbatch_size` is set",
                trainer.accumulate,
                "Both cut the local batch: keep one of them.",
            )
        )
    if trainer.prefetch_factor != 2 and trainer.num_workers == 0:
        accepted = "2, its default, where `trainer.num_workers` is 0"
        fix = "It is what each process loads ahead: set `trainer.num_workers` as well."
        problems.append(must_be("trainer.prefetch_factor", accepted, trainer.prefetch_factor, fix))
    if trainer.max_steps is not None and trainer.warmup_steps > trainer.max_steps:
        problems.append(
            must_be(
                "trainer.warmup_steps",
                f"at most `trainer.max_steps` ({trainer.max_steps})",
                trainer.warmup_steps,
            )
        )
    if trainer.early_stopping.patience is not None and trainer.eval_every == 0:
        problems.append(
            must_be("trainer.eval_every", "above 0 where `trainer.early_stopping.patience` is set", 0)
        )
    if trainer.early_stopping.metric == "accuracy" and trainer.loss in ("mse", "reconstruction"):
        problems.append(
            must_be(
                "trainer.early_stopping.metric", f"loss where `trainer.loss` is {trainer.loss}", "accuracy"
            )
        )
    problems += _fault_clashes(config.fault) + _hardware_clashes(config.hardware)
    return problems + cluster_problems(config.cluster, config.node) + _host_devices(config.cluster)


def _host_devices(cluster: ClusterConfig) -> list[str]:
    """What is wrong with the devices of `cluster.hosts`, which are written as `hardware.devices`."""
    problems = []
    for position, host in enumerate(cluster.hosts):
        if host.devices is None:
            continue
        try:
            hardware = HardwareConfig.model_validate_json(json.dumps({"devices": host.devices}), strict=True)
            found = _hardware_clashes(hardware)
        except ValidationError as error:
            found = explain(error, {"devices": host.devices}, "hardware", HardwareConfig)
        problems += [
            one.replace("hardware.devices", f"cluster.hosts[{position}].devices", 1) for one in found
        ]
    return problems


def _fault_clashes(fault: FaultConfig) -> list[str]:
    problems = []
    for position, event in enumerate(fault.events):
        key = f"fault.events[{position}]"
        if (event.at_step is None) == (event.at_seconds is None):
            problems.append(
                f"`{key}` must name either `at_step` or `at_seconds`, but names "
                f"{'neither' if event.at_step is None else 'both'} instead."
            )
        if event.until_step is not None and event.until_step <= (event.at_step or 0):
            problems.append(
                must_be(f"{key}.until_step", f"after step {event.at_step or 0}", event.until_step)
            )
    return problems


def _hardware_clashes(hardware: HardwareConfig) -> list[str]:
    problems = []
    if hardware.cards is not None and hardware.devices:
        problems.append(
            must_be(
                "hardware.cards",
                "null where `hardware.devices` is given",
                hardware.cards,
                "Add hardware=mix, which leaves the devices to the cards.",
            )
        )
    if hardware.cards is None and not hardware.devices:
        problems.append("`hardware.devices` must be given where `hardware.cards` is null, but is missing.")
    for position, entry in enumerate(hardware.devices):
        key = f"hardware.devices[{position}]"
        if entry.device is not None and entry.emulate_as is not None:
            problems.append(
                must_be(
                    f"{key}.emulate_as",
                    "absent beside `device`",
                    entry.emulate_as,
                    f"A card is emulated by name: 'emulated:{entry.emulate_as}'.",
                )
            )
        if entry.match is not None and entry.vendor is None:
            problems.append(must_be(f"{key}.match", "absent without `vendor`", entry.match))
        emulated = entry.emulate_as is not None or (entry.device or "").startswith("emulated:")
        for figure in ("efficiency", "overhead_seconds"):
            value = getattr(entry, figure)
            if value is not None and not emulated:
                accepted = "absent where no card is emulated"
                fix = "It is beside 'emulated:<card>' or `emulate_as`."
                problems.append(must_be(f"{key}.{figure}", accepted, value, fix))
        if (entry.device is None) == (entry.vendor is None):
            problems.append(
                f"`{key}` must name either `device` or `vendor`, but names "
                f"{'neither' if entry.device is None else 'both'} instead."
            )
    return problems


_WORDS = {
    "array": "list",
    "object": "mapping",
    "an object": "a mapping",
    "boolean": "boolean (true or false)",
}
"""JSON's words and ours."""


def explain(
    error: ValidationError, raw: Any, prefix: str = "", schema: type[BaseModel] | None = Config
) -> list[str]:
    """Turn a pydantic error into sentences of the project's own grammar, one a problem.

    Args:
        raw: the value that was checked.
        prefix: key of that value.
        schema: model that it was checked against, to suggest keys from; `None` suggests nothing.
    """
    problems: list[str] = []
    seen: set[str] = set()
    for item in error.errors(include_url=False):
        key = dotted(prefix, _without_branches(item["loc"], raw, item["type"]))
        kind, value = item["type"], item["input"]
        if key in seen:  # a union reports each of its branches; one sentence is enough for a person
            continue
        seen.add(key)
        if kind == "extra_forbidden":
            known = _known_keys(schema, item["loc"])
            owner = key.rpartition(".")[0]
            where = f"`{owner}`" if owner else "the configuration"
            problems.append(
                f"`{key}` is not a key of {where} (its value is {value!r})."
                + did_you_mean(str(item["loc"][-1]), known)
            )
        elif kind == "missing":
            problems.append(f"`{key}` must be given, but is missing.")
        elif kind == "too_short":
            problems.append(must_be(key, "a list with at least one entry", value))
        else:
            accepted = item["msg"].removeprefix("Input should be ").removeprefix("a valid ")
            accepted = _WORDS.get(accepted, accepted)
            article = "a " if item["msg"].startswith("Input should be a valid") else ""
            article = "an " if article and accepted[0] in "aeiou" else article
            problems.append(must_be(key, article + accepted, value, how_to_write(kind, value)))
    return problems


def _without_branches(location: tuple[int | str, ...], raw: Any, kind: str) -> tuple[int | str, ...]:
    """Leave out the names of union branches, which pydantic puts between the keys that a person wrote."""
    kept: list[int | str] = []
    value = raw
    for position, part in enumerate(location):
        absent = kind == "missing" and position == len(location) - 1
        if isinstance(value, dict) and (part in value or absent):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif isinstance(part, int):  # below a short form (`cpu` for `[{device: cpu}]`)
            value = raw if isinstance(value, str) else None
        else:
            continue
        kept.append(part)
    return tuple(kept)


def dotted(prefix: str, location: tuple[int | str, ...]) -> str:
    """Join a pydantic location to a Hydra key: `hardware.devices[0].count`."""
    key = prefix
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        elif part:
            key += f".{part}" if key else str(part)
    return key


def _known_keys(schema: type[BaseModel] | None, location: tuple[int | str, ...]) -> list[str]:
    """Keys that the section at `location` accepts, its last part being the unknown one."""
    model: Any = schema
    for part in location[:-1]:
        if isinstance(part, int) or model is None:
            continue
        annotation = model.model_fields[part].annotation
        inner = [a for a in getattr(annotation, "__args__", ()) if hasattr(a, "model_fields")]
        model = inner[0] if inner else annotation
    return list(model.model_fields) if model is not None else []
