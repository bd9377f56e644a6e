"""Where a run's model may be cut, found out before anything starts."""

from __future__ import annotations

import json
from functools import lru_cache

import torch

from hetexp.core.config import Config
from hetexp.data.base import build_data
from hetexp.model.base import build_model
from hetexp.model.cut import whole_of
from hetexp.training.seeding import seeded


def layer_names(config: Config) -> tuple[str, ...]:
    """Return the names of the model's layers.

    The data set is built as the ranks build it, and the model without memory where it can be.

    Raises:
        ConfigError: the model cannot be cut.
        Exception: whatever a person's own classes raise.
    """
    return _layer_names(json.dumps([config.model, config.data, config.trainer.seed], sort_keys=True))


@lru_cache(maxsize=8)
def _layer_names(described: str) -> tuple[str, ...]:
    model_node, data_node, seed = json.loads(described)
    with seeded(seed):
        facts = build_data(data_node).facts
    try:
        with torch.device("meta"):
            model = build_model(model_node, facts)
    except Exception:  # it reads values while it is built, or is simply wrong: then this raises, too
        with torch.random.fork_rng(devices=[]):
            model = build_model(model_node, facts)
    return whole_of(model).pieces.layer_names
