"""Other interpreters: how they are made, recorded and tried."""
