"""A whole run, with its smaller sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hetexp.core.cluster import ClusterConfig
from hetexp.core.config.comm import CommConfig
from hetexp.core.config.fault import FaultConfig
from hetexp.core.config.hardware import HardwareConfig
from hetexp.core.config.monitor import MonitorConfig
from hetexp.core.config.trainer import TrainerConfig
from hetexp.core.section import Name, Section, without_problem
from hetexp.core.sweep.folder import name_problem

COMPONENTS = ("strategy", "balancing", "model", "data", "optimizer", "logger")
"""Sections built by `_target_`."""
Component = dict[str, Any]


class LaunchConfig(Section):
    """How ranks start and end."""

    start_method: Literal["auto", "subprocess", "forkserver"] = "auto"
    """How ranks start. `forkserver` forks them from a process that imports torch once for all, while the run
    is planned. `auto` does so on the CPU under Linux, unless `comm.env` sets variables; a card's rank is a
    process of its own."""
    timeout_seconds: PositiveFloat = 120.0
    """Longest wait until all ranks have started and agreed."""
    grace_seconds: PositiveFloat = 3.0
    """Time for ranks to end by themselves before they are killed."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the store on this host; 0: a free one."""


class SweepConfig(Section):
    """The runs of a sweep (`-m`). No key here changes the result of a run."""

    name: Annotated[Name, without_problem(name_problem)] | None = None
    """Folder below `outputs/sweeps`; `null`: a new one. An existing sweep is continued."""
    report: bool = True
    """Whether to compare the runs at the end."""
    wait_seconds: NonNegativeFloat | None = None
    """Longest wait for a device that another run holds; `null`: no limit."""
    share_cpu: bool = False
    """Whether jobs may compute on the CPU at the same time, which slows each other. Emulated devices count as
    well."""


OF_LABELS = ("cross_entropy", "model")
"""Losses that leave out a label, -100 unless `ignore_index` names another one."""


class LossConfig(Section):
    """Arguments of `trainer.loss`: each loss takes some, a class of your own any (`+loss.margin=0.2`).

    The loss's own class checks them (`hetexp.training.loss`).
    """

    model_config = ConfigDict(extra="allow")

    count: str | None = None
    """What the mean of a model's own loss is taken over: `samples`, `labels` (those that count),
    `shifted_labels` (of causal language models), or the dotted path of a function of the targets; `null`:
    samples, if each has one label."""
    weight: list[NonNegativeFloat] | None = None
    """Weight of each class."""
    label_smoothing: Annotated[float, Field(ge=0, le=1)] | None = None
    """Part of each label that all classes share."""
    ignore_index: int | None = None
    """Label that does not count; `null`: -100."""
    pos_weight: NonNegativeFloat | list[NonNegativeFloat] | None = None
    """Factor of the loss of positive targets in `bce`, one for all or one of each class."""
    delta: PositiveFloat | None = None
    """Error from which on `huber` grows linearly; `null`: 1."""
    class_dim: int | None = None
    """Dimension of the classes in the output: -1 (the last) or 1; `null`: by the shapes."""
    output: str | int | None = None
    """Key or number of the model's output that the loss takes; `null`: `logits`, `out`, or the only one."""
    target: str | int | None = None
    """Key or number of the targets that the loss takes; `null`: `labels`, `label`, or the only one."""
    terms: dict[str, dict[str, Any]] | None = None
    """Losses that `trainer.loss=sum` adds up, by name: `{loss: mse, factor: 0.5, output: KEY, target: KEY}`.
    Further keys of a term are arguments of its loss."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that are given."""
        given = {name: getattr(self, name) for name in type(self).model_fields} | (self.model_extra or {})
        return {name: value for name, value in given.items() if value is not None}

    def ignored(self) -> tuple[int, ...]:
        """Return the labels that do not count, several if terms differ in them; none: the default."""
        if self.terms is None:
            return () if self.ignore_index is None else (self.ignore_index,)
        terms = (
            term for term in self.terms.values() if "ignore_index" in term or term.get("loss") in OF_LABELS
        )
        return tuple(dict.fromkeys(term.get("ignore_index", -100) for term in terms))


class DebugConfig(Section):
    """Switches to find mistakes, not for training."""

    normalizer: Literal["global", "per_rank"] = "global"
    """Count by which losses are divided. `per_rank` is each rank's own, as in plain DDP: wrong on unequal
    shares, for comparison. Local steps ignore it."""
    detect_anomaly: bool = False
    """Whether torch's anomaly detection is on (`torch.autograd.set_detect_anomaly`)."""
    dropout: bool = True
    """Whether dropout is on; `false`: every dropout of the model is 0, so that runs can be compared."""
    first_epoch_steps: PositiveInt | None = None
    """Number of steps of the first epoch, which then begins later in its order, to compare its end; `null`:
    all."""
    exchange: bool = True
    """Whether gradients are exchanged; `false` times a step of ddp without it. Weights then differ between
    devices."""


class Config(Section):
    """A whole run, as `conf/config.yaml` composes it."""

    hardware: HardwareConfig
    strategy: Component
    """How the devices train together; the group's option gives the other keys."""
    balancing: Component
    """How devices share the global batch."""
    model: Component
    """The model to train."""
    data: Component
    """The data to train on."""
    optimizer: Component
    """How gradients change the weights; the group's option gives the other keys."""
    logger: Component
    """The experiment tracker."""
    trainer: TrainerConfig
    loss: LossConfig = LossConfig()
    comm: CommConfig = CommConfig()
    launch: LaunchConfig = LaunchConfig()
    sweep: SweepConfig = SweepConfig()
    debug: DebugConfig = DebugConfig()
    fault: FaultConfig = FaultConfig()
    monitor: MonitorConfig = MonitorConfig()
    cluster: ClusterConfig = ClusterConfig()
    node: str | None = None
    """This machine's name in `cluster.hosts`, if neither its host name nor an address matches."""
    fallback: Literal["single"] | None = None  # written `strategy.fallback`
    """`single` goes on with the fastest device alone if the strategy cannot run; `null`: the run ends."""
    plan_only: bool = False
    """Whether to print the prediction of each strategy and policy, and start nothing."""
    diagram: bool = True
    """Whether to draw the plan into the run folder: `plan.mmd`, and images if Graphviz is installed."""
    resume: str | None = None
    """Checkpoint to start from: `auto`, `last`, `best`, `step:100`, or a folder. The first four belong to a
    run of the same job. The folder is a checkpoint's or a run's (`RUN`, `RUN/best`, `RUN/step:100`)."""
    trust_owner: str | None = None
    """Another user whose folders `resume` takes; `null`: only your own, and those of the system's
    administrator."""
    name: str | None = None
    """Name of the run; `null`: the typed overrides."""
