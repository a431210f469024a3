"""`python -m jaxlc.profile` is `jaxlc profile`."""

import sys

from jaxlc.cli import main_of

main = main_of("profile")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
