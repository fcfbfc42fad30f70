"""Lets ``python -m carpool`` stand for ``carpool``."""

from carpool.cli.main import main

if __name__ == "__main__":
    main()
