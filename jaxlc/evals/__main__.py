"""`python -m jaxlc.evals` is `jaxlc eval`."""

import sys

from jaxlc.cli import main_of

main = main_of("eval")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
