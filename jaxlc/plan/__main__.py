"""`python -m jaxlc.plan` is `jaxlc plan`."""

import sys

from jaxlc.cli.plan import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
