"""`python -m jaxlc.profile` is `jaxlc profile`."""

import sys

from jaxlc.cli.training import profile_main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
