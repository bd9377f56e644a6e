"""Connections between ranks: how they are watched, closed and let go."""
