"""hetexp inside a person's own training script: `hetexp.setup` and what it returns."""
