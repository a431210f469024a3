"""`python -m jaxlc.evals` is `jaxlc eval`."""

import sys

from jaxlc.cli.inference import eval_main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
