"""`python -m jaxlc.logprobs` is `jaxlc logprobs`."""

import sys

from jaxlc.cli.logprobs import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
