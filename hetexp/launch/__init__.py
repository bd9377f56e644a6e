"""The launcher: one process a device, followed to its end, whatever happens."""
