"""`jaxlc.sweep.load` reads the results of a sweep; `python -m jaxlc.sweep` is `jaxlc sweep`."""

import sys

from jaxlc.cli.planning import sweep_main as main
from jaxlc.search.ranking import load

__all__ = ["load", "main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv))
