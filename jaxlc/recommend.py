"""`python -m jaxlc.recommend` is `jaxlc recommend`."""

import sys

from jaxlc.cli import main_of

main = main_of("recommend")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
