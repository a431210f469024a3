"""`python -m jaxlc.profile` is `jaxlc profile`."""

import sys

from jaxlc.cli import main_of

if __name__ == "__main__":
    sys.exit(main_of("profile")(sys.argv))
