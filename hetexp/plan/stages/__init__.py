"""Which device gets which layers of a model."""
