"""The output of a run in the terminal."""
