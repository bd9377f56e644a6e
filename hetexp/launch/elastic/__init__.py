"""How a run outlives its devices: health, membership, respawn and restart."""
