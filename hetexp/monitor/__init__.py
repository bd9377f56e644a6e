"""What the devices do: samples of them, kept in a small database, shown in a terminal. No torch."""
