"""`python -m jaxlc.generation` is `jaxlc generate`."""

import sys

from jaxlc.cli import main_of

if __name__ == "__main__":
    sys.exit(main_of("generate")(sys.argv))
