"""Policies: facts of the devices in, shares out. Pure functions, torch-free."""
