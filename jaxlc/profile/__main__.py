"""`python -m jaxlc.profile` is `jaxlc profile`."""

import sys

from jaxlc.cli.profile import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
