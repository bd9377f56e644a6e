"""The base of strategies whose ranks exchange gradients in a way of their own, and then step alike."""

from hetexp.strategy.synchronous.exchange import GradientExchange
from hetexp.strategy.synchronous.strategy import Synchronous

__all__ = ["GradientExchange", "Synchronous"]
