"""`python -m megazero.cli`."""

from megazero.cli import main

if __name__ == "__main__":
    main()
