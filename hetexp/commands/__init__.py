"""The subcommands of `hetexp`, one file each."""
