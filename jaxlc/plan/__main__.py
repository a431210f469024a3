"""`python -m jaxlc.plan` is `jaxlc plan`."""

import sys

from jaxlc.cli import main_of

if __name__ == "__main__":
    sys.exit(main_of("plan")(sys.argv))
