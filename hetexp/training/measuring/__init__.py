"""What a run measures or estimates of its devices before it trains."""
