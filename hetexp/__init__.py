"""hetexp: train one PyTorch model on unequal devices. Importing it never imports torch."""

__version__ = "0.1.0"
