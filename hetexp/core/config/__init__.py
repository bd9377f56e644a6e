"""The typed configuration. Hydra composes it, and `read_config` reports every problem at once, by key.

Each section is a pydantic model. `hetexp.core.instantiate` checks a section that names a class by `_target_`
(`strategy`, `balancing`, `model`, `data`, `optimizer`, `logger`) against the signature of that class. A
user's class therefore needs no schema of its own.
"""

from hetexp.core.config.check import check_config, for_devices, optimizer_keys, own_arguments, read_config
from hetexp.core.config.comm import CommConfig, variables
from hetexp.core.config.explain import explain, validated
from hetexp.core.config.fault import FaultConfig, FaultEvent
from hetexp.core.config.hardware import DeviceEntry, HardwareConfig, Vendor
from hetexp.core.config.monitor import MonitorConfig, RetentionConfig
from hetexp.core.config.optimizer import GroupConfig, OptimizerKeys, group_entries
from hetexp.core.config.root import COMPONENTS, Config, DebugConfig, LaunchConfig, LossConfig, SweepConfig
from hetexp.core.config.samples import COLLATE, SampleKeys, sample_keys
from hetexp.core.config.trainer import EarlyStoppingConfig, TrainerConfig

# fmt: off
__all__ = [
    "COLLATE", "COMPONENTS", "CommConfig", "Config", "DebugConfig", "DeviceEntry", "EarlyStoppingConfig",
    "FaultConfig", "FaultEvent", "GroupConfig", "HardwareConfig", "LaunchConfig", "LossConfig",
    "MonitorConfig", "OptimizerKeys", "RetentionConfig", "SampleKeys", "SweepConfig", "TrainerConfig",
    "Vendor", "check_config", "explain", "for_devices", "group_entries", "optimizer_keys", "own_arguments",
    "read_config", "sample_keys", "validated", "variables",
]
