"""Predictions: every strategy and policy on a plan's devices, before anything runs."""
