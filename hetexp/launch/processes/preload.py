"""Imports of the fork server, so that a forked rank imports nothing slow again.

Besides torch these are all modules of hetexp that a rank may use. Their import opens no device, starts no
thread and reads no environment variable.
"""

import contextlib
import importlib
import pkgutil

import hydra.utils  # noqa: F401
import numpy  # noqa: F401
import safetensors.torch  # noqa: F401
import sklearn.datasets
import sklearn.model_selection  # noqa: F401
import torch.distributed
import torch.distributed.pipelining
import torch.nn.parallel
import torch.utils.flop_counter  # noqa: F401

from hetexp.torch_private import import_compiler

import_compiler()

PACKAGES = (
    "core",
    "balancing",
    "hardware",
    "model",
    "data",
    "optimizer",
    "logger",
    "comm",
    "checkpoint",
    "strategy",
    "plan",
    "training",
    "library",
)
"""Packages that a rank uses."""
ON_CARDS_ONLY = ("hetexp.training.logits.triton_logits",)
"""Modules that import a vendor's own packages."""


def import_all() -> None:
    """Import every module of `PACKAGES`, except those that need a package that is not installed."""
    for name in PACKAGES:
        package = importlib.import_module(f"hetexp.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name not in ON_CARDS_ONLY:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module.name)


import_all()
