"""Which rank gets which layers and which samples, where the strategy cuts the model."""

from __future__ import annotations

from hetexp.core.config import Config
from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import instantiate
from hetexp.core.plan import Plan
from hetexp.launch.prepare.arrange import arranged, with_arrangement
from hetexp.strategy.pipeline.staged import Staged


def check_model(config: Config) -> list[str]:
    """Return what keeps the model from being cut as the configuration says, where it is to be cut.

    To know that, the data set and the model are built. The ranks do the same, and report what a person's own
    classes raise there.
    """
    strategy = instantiate(config.strategy)
    if not isinstance(strategy, Staged):
        return []
    from hetexp.strategy.pipeline.pieces import layer_names

    try:
        layers = layer_names(config)
    except ConfigError as error:
        return error.problems
    except Exception:  # a person's own code
        return []
    return strategy.check_layers(layers)


def with_stages(plan: Plan, config: Config) -> Plan:
    """Return the plan with each rank's stages.

    A rank's share is then its part of a step's work, and its samples are those of its pipeline.

    Raises:
        ConfigError: the model may not be cut, or its stages do not fit the devices.
    """
    return with_arrangement(plan, arranged(plan, config))
