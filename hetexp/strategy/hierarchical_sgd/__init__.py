"""Hierarchical local SGD: exact inside each host, local SGD between hosts."""

from hetexp.strategy.hierarchical_sgd.strategy import HierarchicalSGD

__all__ = ["HierarchicalSGD"]
