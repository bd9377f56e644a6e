"""The step loop, evaluation and what a run measures of itself; sees interfaces only."""
