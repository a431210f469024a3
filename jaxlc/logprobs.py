"""`python -m jaxlc.logprobs` is `jaxlc logprobs`."""

import sys

from jaxlc.cli import main_of

if __name__ == "__main__":
    sys.exit(main_of("logprobs")(sys.argv))
