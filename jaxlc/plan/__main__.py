"""`python -m jaxlc.plan` is `jaxlc plan`."""

import sys

from jaxlc.cli import main_of

main = main_of("plan")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
