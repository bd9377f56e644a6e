"""Checkpoints: folders that appear whole, hold no pickle, and load on any device."""
