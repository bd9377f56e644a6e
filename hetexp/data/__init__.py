"""Data: what a run trains on, and the order in which it uses it."""
