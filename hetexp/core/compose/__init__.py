"""From what a person typed to what Hydra composes."""
