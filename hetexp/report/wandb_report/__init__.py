"""The comparison as a W&B report."""
