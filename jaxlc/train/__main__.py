"""`python -m jaxlc.train` is `jaxlc train`."""

import sys

from jaxlc.cli.training import train_main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
