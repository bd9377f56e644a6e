"""From what the user typed to what Hydra composes."""
