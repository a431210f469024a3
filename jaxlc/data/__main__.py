"""`python -m jaxlc.data` is `jaxlc data`."""

import sys

from jaxlc.cli.training import data_main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
