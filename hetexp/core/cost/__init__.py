"""The cost model: how long a device, an exchange and a pipeline take. Pure functions."""
