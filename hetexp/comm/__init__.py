"""Between ranks: agreement before training, collectives during it."""
