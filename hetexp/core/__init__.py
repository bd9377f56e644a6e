"""Errors, configuration, plan and cost model, which all packages share; never imports torch."""
