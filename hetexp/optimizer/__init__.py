"""The optimizer and the learning-rate schedule, built from the configuration."""
