"""Gradients that are not finite: detection, skipped steps, and messages."""
