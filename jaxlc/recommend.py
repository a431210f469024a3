"""`python -m jaxlc.recommend` is `jaxlc recommend`."""

import sys

from jaxlc.cli.recommend import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
