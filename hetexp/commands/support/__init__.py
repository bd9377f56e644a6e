"""What the commands share or print; not commands themselves."""
