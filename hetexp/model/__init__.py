"""Models that ship with hetexp, and how a model is built from its configuration."""
