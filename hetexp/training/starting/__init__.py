"""The start of a rank: what it builds, the trial of the first samples, and what all ranks agree on."""
