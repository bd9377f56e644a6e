"""Independent training: a model a device, merged at the end."""

from hetexp.strategy.independent.strategy import Independent

__all__ = ["Independent"]
