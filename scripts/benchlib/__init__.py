"""What benchmarks share: runs of hetexp, options of a command line, and Markdown tables."""
