"""Train one model on unequal devices: `python train.py --help`."""

# Shells complete `python <file>` only where they find this word in the file: @hydra.main

from hetexp.app import main

if __name__ == "__main__":
    main()
