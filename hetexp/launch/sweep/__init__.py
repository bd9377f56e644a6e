"""A sweep under way, and its end."""
