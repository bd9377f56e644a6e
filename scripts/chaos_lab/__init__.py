"""Runs that are killed on purpose: what is done to them, and what must hold afterwards."""
