"""`python -m jaxlc.exporting` is `jaxlc export`."""

import sys

from jaxlc.cli import main_of

if __name__ == "__main__":
    sys.exit(main_of("export")(sys.argv))
