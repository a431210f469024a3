"""`python -m jaxlc.data` is `jaxlc data`."""

import sys

from jaxlc.cli import main_of

main = main_of("data")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
