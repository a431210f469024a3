"""`python -m jaxlc.checkpoints` is `jaxlc checkpoint`."""

import sys

from jaxlc.cli.checkpoint import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
