"""Collectives through the shared memory of the ranks of one host."""
