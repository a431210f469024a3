"""`python -m jaxlc.generation` is `jaxlc generate`."""

import sys

from jaxlc.cli import main_of

main = main_of("generate")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
