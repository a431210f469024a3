"""`python -m jaxlc.checkpoints` is `jaxlc checkpoint`."""

import sys

from jaxlc.cli.checkpoints import checkpoint_main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
