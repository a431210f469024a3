"""`python -m jaxlc.evals` is `jaxlc eval`."""

import sys

from jaxlc.cli import main_of

if __name__ == "__main__":
    sys.exit(main_of("eval")(sys.argv))
