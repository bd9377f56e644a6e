"""Strategies of sharing the work: one file or folder each, built from the Hydra group of the same name."""
