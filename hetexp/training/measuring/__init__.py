"""Measurements and estimates of a run's devices and model, before and after training."""
