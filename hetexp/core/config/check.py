"""The check of a whole configuration: every problem at once, by key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hetexp.core.cluster import ClusterConfig, cluster_problems
from hetexp.core.config.explain import validated
from hetexp.core.config.fault import fault_problems
from hetexp.core.config.hardware import HardwareConfig, hardware_problems
from hetexp.core.config.optimizer import OptimizerKeys
from hetexp.core.config.root import Config
from hetexp.core.config.samples import class_arguments
from hetexp.core.config.trainer import trainer_problems
from hetexp.core.config.weights import without_weights
from hetexp.core.errors import ConfigError, must_be

_OWN_KEYS: dict[str, tuple[str, ...]] = {
    "strategy": ("fallback",),
    "optimizer": tuple(OptimizerKeys.model_fields),
}
"""Section → keys that hetexp itself reads there; the others are arguments of the section's class."""


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
    """Return the typed configuration (`None` if it cannot be built) and all problems."""
    plain, wrong = _with_fallback_on_top(raw)
    config, problems = validated(Config, plain)
    if config is not None:
        problems = _batch_clash(raw["trainer"]) + _clashes(config)
        problems += optimizer_keys(config.optimizer)[1]
    return config, wrong + problems


def optimizer_keys(section: dict[str, Any]) -> tuple[OptimizerKeys | None, list[str]]:
    """Return hetexp's own keys of the section `optimizer` (`None` if wrong), and their problems."""
    own = {name: section[name] for name in _OWN_KEYS["optimizer"] if name in section}
    return validated(OptimizerKeys, own, "optimizer")


def own_arguments(section: str, node: Any, named: Collection[str] = ()) -> Any:
    """Return the arguments of a section's class, without the keys that hetexp itself reads there.

    Args:
        named: arguments that the class names in its signature; they matter for `data` and `model` only.
    """
    if section == "data" and isinstance(node, Mapping):
        return class_arguments(node, named)
    if section == "model" and isinstance(node, Mapping):
        return without_weights(node, named)
    if section not in _OWN_KEYS or not isinstance(node, dict):
        return node
    return {name: value for name, value in node.items() if name not in _OWN_KEYS[section]}


def _with_fallback_on_top(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration with `strategy.fallback` as the key `fallback`, and its problems."""
    strategy = raw.get("strategy")
    if not isinstance(strategy, dict) or "fallback" not in strategy:
        return raw, []
    fallback, problems = strategy["fallback"], []
    if fallback not in (None, "single"):
        problems = [must_be("strategy.fallback", "single or null", fallback)]
        fallback = None
    return raw | {"strategy": own_arguments("strategy", strategy), "fallback": fallback}, problems


def for_devices(config: Config, raw: dict[str, Any], count: int) -> tuple[Config, dict[str, Any]]:
    """Return both forms of the configuration with a global batch for `count` devices."""
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
    """Return the clashes between values that are each right."""
    problems = trainer_problems(config.trainer) + fault_problems(config.fault)
    problems += hardware_problems(config.hardware) + cluster_problems(config.cluster, config.node)
    return problems + _host_devices(config.cluster)


def _host_devices(cluster: ClusterConfig) -> list[str]:
    """Return the problems of the devices of `cluster.hosts`, which are written as `hardware.devices`."""
    problems = []
    for position, host in enumerate(cluster.hosts):
        if host.devices is None:
            continue
        hardware, found = validated(HardwareConfig, {"devices": host.devices}, "hardware")
        found += hardware_problems(hardware) if hardware is not None else []
        key = f"cluster.hosts[{position}].devices"
        problems += [problem.replace("hardware.devices", key, 1) for problem in found]
    return problems
