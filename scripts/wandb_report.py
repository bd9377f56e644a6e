"""Save the comparison of runs as a W&B report: python scripts/wandb_report.py FOLDER [--dry-run]."""

from __future__ import annotations

import sys

from hetexp.commands.report import main

if __name__ == "__main__":
    sys.exit(main(["--wandb", *sys.argv[1:]]))
