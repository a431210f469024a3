"""`python -m jaxlc.preflight` is `jaxlc preflight`."""

import sys

from jaxlc.cli.preflight import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
