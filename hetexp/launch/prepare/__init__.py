"""From a checked configuration to the plan that is launched."""
