"""Train one model on unequal devices: `python train.py --help`."""

from hetexp.app import main

if __name__ == "__main__":
    main()
