"""The names of the layers between which a run's model may be cut, before anything starts."""

from __future__ import annotations

import json
from functools import lru_cache

from hetexp.core.config import Config
from hetexp.data.base import build_data
from hetexp.model.cut import whole_of
from hetexp.training.measuring.estimate import build_on_meta
from hetexp.training.seeding import seeded


def layer_names(config: Config) -> tuple[str, ...]:
    """Return the names of the model's layers.

    The data set is built as the ranks build it, and the model on the meta device if possible.

    Raises:
        ConfigError: the model cannot be cut.
        Exception: any error of the user's own classes.
    """
    return _layer_names(json.dumps([config.model, config.data, config.trainer.seed], sort_keys=True))


@lru_cache(maxsize=8)
def _layer_names(described: str) -> tuple[str, ...]:
    model_node, data_node, seed = json.loads(described)
    with seeded(seed):
        facts = build_data(data_node).facts
    return whole_of(build_on_meta(model_node, facts)).pieces.layer_names
