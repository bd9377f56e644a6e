"""From a checked configuration and the chosen devices to a plan."""
