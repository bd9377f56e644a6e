"""Which cards this machine has, who can drive them and who uses them."""
