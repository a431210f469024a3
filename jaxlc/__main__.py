"""`python -m jaxlc VERB ...` is `jaxlc VERB ...`."""

import sys

from jaxlc.cli import main

if __name__ == "__main__":
    sys.exit(main())
