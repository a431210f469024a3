"""`python -m jaxlc.checkpoints` is `jaxlc checkpoint`."""

import sys

from jaxlc.cli import main_of

main = main_of("checkpoint")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
