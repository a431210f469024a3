"""`python -m jaxlc.preflight` is `jaxlc preflight`."""

import sys

from jaxlc.cli.training import preflight_main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
