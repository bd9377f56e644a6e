"""Comparison of runs, and diagrams: reads run folders, and imports neither torch nor what trains."""
