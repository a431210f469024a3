"""`python -m jaxlc.logprobs` is `jaxlc logprobs`."""

import sys

from jaxlc.cli.inference import logprobs_main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
