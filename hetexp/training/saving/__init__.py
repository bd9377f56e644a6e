"""Checkpoints: written, rotated, and resumed from."""
