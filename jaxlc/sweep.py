"""`jaxlc.sweep.load` reads the results of a sweep; `python -m jaxlc.sweep` is `jaxlc sweep`."""

import sys

from jaxlc.cli import main_of
from jaxlc.search.ranking import load

main = main_of("sweep")

__all__ = ["load", "main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv))
