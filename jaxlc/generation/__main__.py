"""`python -m jaxlc.generation` is `jaxlc generate`."""

import sys

from jaxlc.cli.inference import generate_main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
