"""`python -m hetexp` is the command `hetexp`, also where the package is not installed."""

from hetexp.cli import main

if __name__ == "__main__":
    main()
