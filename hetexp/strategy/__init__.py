"""How the work is shared: one file a strategy, built from the Hydra group of the same name."""
