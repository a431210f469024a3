"""The same command as `python -m jaxlc.sweep`: compares meshes and ranks them by speed."""

import sys

from jaxlc.sweep import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
