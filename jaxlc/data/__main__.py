"""`python -m jaxlc.data` is `jaxlc data`."""

import sys

from jaxlc.cli import main_of

if __name__ == "__main__":
    sys.exit(main_of("data")(sys.argv))
