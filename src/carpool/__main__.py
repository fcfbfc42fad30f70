"""Makes ``python -m carpool`` the same as ``carpool``."""

from carpool.cli.main import main

if __name__ == "__main__":
    main()
