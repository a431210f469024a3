"""`python -m jaxlc.exporting` is `jaxlc export`."""

import sys

from jaxlc.cli.checkpoints import export_main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
