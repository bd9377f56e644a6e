"""The base of strategies with their own exchange of gradients, whose ranks then step alike."""

from hetexp.strategy.synchronous.exchange import GradientExchange
from hetexp.strategy.synchronous.strategy import Synchronous

__all__ = ["GradientExchange", "Synchronous"]
