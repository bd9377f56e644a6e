"""Communication between ranks: rendezvous before training, collectives during it."""
