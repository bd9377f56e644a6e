"""From `hardware.devices` to the devices of a run."""
