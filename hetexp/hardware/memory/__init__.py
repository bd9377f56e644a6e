"""How much memory a training step takes on a device, estimated before it runs."""
