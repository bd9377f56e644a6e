"""Ranks that this launcher does not start itself: those of other machines, and those of another engine."""
