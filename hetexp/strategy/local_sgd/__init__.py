"""Local SGD: the strategy, what a rank does in it, and its part of a checkpoint."""

from hetexp.strategy.local_sgd.strategy import LocalSGD

__all__ = ["LocalSGD"]
