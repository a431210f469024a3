"""`python -m jaxlc.recommend` is `jaxlc recommend`."""

import sys

from jaxlc.cli import main_of

if __name__ == "__main__":
    sys.exit(main_of("recommend")(sys.argv))
