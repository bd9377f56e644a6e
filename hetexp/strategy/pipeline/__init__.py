"""Pipelines: the strategy, a rank's stages, and their part of a checkpoint."""

from hetexp.strategy.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]
