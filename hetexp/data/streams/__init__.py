"""Data that can only be walked through: each rank walks all of it and takes its samples by position."""
