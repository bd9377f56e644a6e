"""What a request may set of the configuration, and the words that Hydra gets of it.

No word of a request is ever read as Hydra's grammar: keys are those below, values are numbers, switches,
options that exist, and texts of few signs, which are written out here.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from hetexp.core.errors import did_you_mean, must_be

Kind = Literal["int", "float", "bool", "choice", "text", "ints", "floats"]
GROUPS = ("model", "data", "strategy", "balancing", "optimizer", "logger")
"""Groups of which an option may be chosen; `experiment` has a field of its own."""
_READING = threading.RLock()
"""Hydra reads configuration in one thread at a time."""
MOST_ENTRIES = 64
"""Of a list."""
_OPTION = re.compile(r"[A-Za-z0-9][\w.-]*")
_TEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.,:+()-]{0,79}")
_NOT_OFFERED = {"model": ("custom",), "data": ("custom",)}
"""Options that only a class of one's own makes whole."""


@dataclass(frozen=True)
class Allowed:
    """One key that a request may set."""

    key: str
    kind: Kind
    description: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] | None = None
    nullable: bool = False

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a value, `None` where it can be used."""
        if value is None and self.nullable:
            return None
        accepted = self._accepted()
        if self.kind in ("ints", "floats"):
            fits = isinstance(value, list) and 0 < len(value) <= MOST_ENTRIES and all(map(self._fits, value))
        else:
            fits = self._fits(value)
        if fits:
            return None
        fix = did_you_mean(value, self.choices).strip() if self.choices and isinstance(value, str) else ""
        return must_be(self.key, accepted, _short(value), fix)

    def _accepted(self) -> str:
        if self.choices is not None:
            words = "one of " + ", ".join(self.choices)
        elif self.kind == "bool":
            words = "true or false"
        elif self.kind == "text":
            words = (
                "at most 80 letters, digits, spaces and any of _ . , : + ( ) -, the first a letter or digit"
            )
        else:
            whole = "whole number" if self.kind in ("int", "ints") else "number"
            bounds = f"from {_number(self.minimum)} to {_number(self.maximum)}"
            words = f"a {whole} {bounds}"
            if self.kind in ("ints", "floats"):
                words = f"a list of 1 to {MOST_ENTRIES} {whole}s {bounds}"
        return words + (", or null" if self.nullable else "")

    def _fits(self, value: object) -> bool:
        if self.kind == "choice":
            return isinstance(value, str) and value in (self.choices or ())
        if self.kind == "bool":
            return isinstance(value, bool)
        if self.kind == "text":
            return isinstance(value, str) and _TEXT.fullmatch(value) is not None
        types = (int,) if self.kind in ("int", "ints") else (int, float)
        if not isinstance(value, types) or isinstance(value, bool) or not math.isfinite(value):
            return False
        assert self.minimum is not None
        assert self.maximum is not None
        return self.minimum <= value <= self.maximum


_TRAINER = (
    Allowed("trainer.global_batch_size", "int", "samples of one optimizer step, over all devices", 1, 65536),
    Allowed("trainer.max_steps", "int", "optimizer steps", 1, 10_000_000, nullable=True),
    Allowed("trainer.max_epochs", "int", "passes over the data", 1, 100_000, nullable=True),
    Allowed("trainer.accumulate", "int", "microbatches that each device cuts its part into", 1, 4096),
    Allowed("trainer.microbatch_size", "int", "most samples of a forward pass", 1, 65536, nullable=True),
    Allowed("trainer.clip_norm", "float", "largest norm of the gradient", 1e-6, 1e6, nullable=True),
    Allowed("trainer.activation_checkpointing", "bool", "compute activations again in backward"),
    Allowed(
        "trainer.precision",
        "choice",
        "what devices compute in",
        choices=("auto", "auto_common", "float32", "bfloat16", "float16", "float64"),
    ),
    Allowed(
        "trainer.non_finite", "choice", "what becomes of such a step", choices=("stop", "skip", "continue")
    ),
    Allowed("trainer.schedule", "choice", "of the learning rate", choices=("constant", "linear", "cosine")),
    Allowed("trainer.warmup_steps", "int", "steps in which the learning rate grows", 0, 10_000_000),
    Allowed("trainer.eval_every", "int", "steps between evaluations; 0: at the end", 0, 10_000_000),
    Allowed("trainer.checkpoint_every", "int", "steps between checkpoints; 0: at the end", 0, 10_000_000),
    Allowed("trainer.checkpoint_minutes", "float", "longest time without a checkpoint; 0: any", 0, 100_000),
    Allowed("trainer.log_every", "int", "steps between lines of the log", 1, 100_000),
    Allowed("trainer.drop_last", "bool", "leave out the last, smaller batch of an epoch"),
    Allowed("trainer.fast_dev_run", "int", "train and evaluate so many batches only", 0, 1000),
    Allowed("trainer.seed", "int", "of weights, samples and their order", 0, 2**32 - 1),
)
_PARTS = (
    Allowed("optimizer.lr", "float", "learning rate", 0, 1e6),
    Allowed("optimizer.weight_decay", "float", "what shrinks the weights", 0, 1e3),
    Allowed("balancing.weights", "floats", "shares of the devices (balancing=manual)", 0, 1e6),
    Allowed("strategy.sync_every", "int", "steps between averages (strategy=local_sgd)", 1, 1_000_000),
    Allowed("model.hidden_sizes", "ints", "width of each layer (model=mlp)", 1, 8192),
    Allowed("model.widths", "ints", "channels of each stage (model=convnet)", 1, 1024),
    Allowed("model.num_layers", "int", "blocks (model=gpt)", 1, 96),
    Allowed("model.num_heads", "int", "attention heads (model=gpt)", 1, 128),
    Allowed("model.embedding_size", "int", "numbers a token (model=gpt)", 1, 8192),
    Allowed("model.dropout", "float", "chance to drop a value", 0, 0.99),
    Allowed("data.num_samples", "int", "of the training data (data=synthetic)", 1, 1_000_000),
    Allowed("data.num_test_samples", "int", "of the evaluation data (data=synthetic)", 0, 1_000_000),
    Allowed("data.sequence_length", "int", "characters of a sample (data=text)", 1, 8192),
    Allowed("comm.wire", "choice", "what gradients travel as", choices=("float32", "bfloat16", "int8")),
    Allowed(
        "comm.boundary_wire",
        "choice",
        "what stages hand on as (strategy=pipeline, hybrid)",
        choices=("float32", "bfloat16", "int8"),
    ),
    Allowed("hardware.time_scale", "float", "emulated seconds take so many", 1e-3, 1e6, nullable=True),
    Allowed("hardware.efficiency", "float", "what emulated cards reach", 1e-6, 1, nullable=True),
    Allowed("hardware.overhead_seconds", "float", "of a pass on emulated cards", 1e-9, 10, nullable=True),
    Allowed("hardware.threads_per_rank", "int", "CPU threads of a rank", 1, 1024, nullable=True),
    Allowed("name", "text", "of the training, for people", nullable=True),
)


def options() -> dict[str, tuple[str, ...]]:
    """Return the options of each group that may be chosen, and of `experiment` those that are no sweep.

    A person's own folder of configuration counts; it is read once.
    """
    with _READING:
        return _options()


def allowed() -> dict[str, Allowed]:
    """Return all keys that a request may set."""
    with _READING:
        return _allowed()


def defaults() -> dict[str, Any]:
    """Return the value of each allowed key in the plain configuration, where it is there."""
    with _READING:
        return _defaults()


@cache
def _options() -> dict[str, tuple[str, ...]]:
    from hetexp.app import register_resolvers
    from hetexp.core.compose.overrides import config_loader
    from hetexp.core.sweep.grid import asks_to_sweep

    register_resolvers()
    found = {}
    with config_loader() as (loader, _):
        for group in (*GROUPS, "experiment"):
            names = [name for name in loader.get_group_options(group) if _OPTION.fullmatch(name)]
            found[group] = [name for name in names if name not in _NOT_OFFERED.get(group, ())]
    found["experiment"] = [name for name in found["experiment"] if not asks_to_sweep([f"experiment={name}"])]
    return {group: tuple(names) for group, names in found.items()}


@cache
def _allowed() -> dict[str, Allowed]:
    chosen = _options()
    groups = [Allowed(group, "choice", f"option of {group}", choices=chosen[group]) for group in GROUPS]
    return {one.key: one for one in (*groups, *_TRAINER, *_PARTS)}


@cache
def _defaults() -> dict[str, Any]:
    from omegaconf import OmegaConf

    from hetexp.core.compose.overrides import compose_typed

    composed, _ = compose_typed([])
    assert composed is not None
    groups = {
        "model": "convnet",
        "data": "digits",
        "strategy": "ddp",
        "balancing": "auto",
        "optimizer": "adamw",
    }
    found: dict[str, Any] = {key: value for key, value in groups.items() if key in allowed()}
    for key in allowed():
        value = OmegaConf.select(composed, key) if key not in GROUPS else None
        if value is not None:
            found[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return found


def problems_of(overrides: Mapping[str, Any], experiment: str | None) -> list[tuple[str | None, str]]:
    """Return what is wrong with a request's overrides by themselves."""
    known = allowed()
    found: list[tuple[str | None, str]] = []
    if experiment is not None:
        names = options()["experiment"]
        problem = Allowed("experiment", "choice", "", choices=names, nullable=True).problem(experiment)
        found += [("experiment", problem)] if problem else []
    for key, value in overrides.items():
        if key not in known:
            shown = _short(key)
            message = f"`{shown}` is not a key that a request may set.{did_you_mean(shown, known)}"
            found.append((shown, f"{message} GET /api/v1/options lists them."))
        else:
            problem = known[key].problem(value)
            found += [(key, problem)] if problem else []
    return found


def words(overrides: Mapping[str, Any], experiment: str | None, devices: Sequence[str]) -> list[str]:
    """Return the words for `hetexp train`, of overrides that `problems_of` has nothing against.

    Args:
        devices: names for `hardware.devices`, which the caller knows to exist.
    """
    chosen = [f"experiment={experiment}"] if experiment is not None else []
    groups = [key for key in GROUPS if key in overrides]
    rest = [key for key in overrides if key not in groups]
    named = "hardware.devices=[" + ",".join(devices) + "]"
    # Cards of an experiment's own would stand beside the chosen devices.
    known = allowed()
    set_ = [f"{key}={_written(known[key].kind, overrides[key])}" for key in (*groups, *rest)]
    return [*chosen, *set_, named, "hardware.cards=null"]


def named(overrides: Mapping[str, Any], experiment: str | None) -> str:
    """Return the name of a training that was given none: what was asked for."""
    asked = [f"experiment={experiment}"] if experiment is not None else []
    known = allowed()
    asked += [
        f"{key}={_written(known[key].kind, value)}" for key, value in overrides.items() if key != "name"
    ]
    return ",".join(asked) or "as configured"


def _written(kind: Kind, value: Any) -> str:
    """Return a value as Hydra reads it back."""
    if value is None:
        return "null"
    if kind in ("ints", "floats"):
        return "[" + ",".join(_written("int" if kind == "ints" else "float", one) for one in value) + "]"
    if kind == "text":  # in quotes, so that `null` and `1` stay texts; it has no sign that means more in them
        return f"'{value}'"
    if kind == "bool":
        return "true" if value else "false"
    return repr(float(value)) if kind == "float" else str(value)


def _number(value: float | None) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _short(value: Any) -> Any:
    """Return a value, or its beginning if it is too long to show."""
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= 80 else f"{text[:77]}…"
