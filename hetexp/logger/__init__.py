"""Metrics of a run: always a JSON-lines file, and a tracker such as Weights & Biases if the user chooses it.

A tracker is a class with the three methods of `hetexp.logger.base.Logger`, named by `logger._target_`. Its
errors never stop the training.
"""
