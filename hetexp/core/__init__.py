"""Errors, configuration, plan and the other words that every room shares; never imports torch."""
