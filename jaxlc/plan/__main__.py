"""`python -m jaxlc.plan` is `jaxlc plan`."""

import sys

from jaxlc.cli.planning import plan_main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
