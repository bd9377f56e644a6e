"""Gradients that are not finite: found, skipped, explained."""
