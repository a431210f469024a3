"""`python -m jaxlc.recommend` is `jaxlc recommend`."""

import sys

from jaxlc.cli.planning import recommend_main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
