"""`python -m jaxlc.checkpoints` is `jaxlc checkpoint`."""

import sys

from jaxlc.cli import main_of

if __name__ == "__main__":
    sys.exit(main_of("checkpoint")(sys.argv))
