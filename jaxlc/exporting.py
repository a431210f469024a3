"""`python -m jaxlc.exporting` is `jaxlc export`."""

import sys

from jaxlc.cli import main_of

main = main_of("export")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
