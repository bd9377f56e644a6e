"""Devices: what is there, what was chosen, and one small backend a vendor that drives it."""
