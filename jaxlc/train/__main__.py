"""`python -m jaxlc.train` is `jaxlc train`."""

import sys

from jaxlc.cli.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
