"""Ranks that another engine has started: torchrun, SLURM, Ray Train. Nothing here starts a process."""
