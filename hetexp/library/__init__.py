"""hetexp inside the user's own training script: `hetexp.setup` and the `Run` that it returns."""
