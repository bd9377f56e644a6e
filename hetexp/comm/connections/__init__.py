"""Connections between ranks: heartbeats, watched stores, and disposal."""
