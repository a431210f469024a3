"""`python -m jaxlc.logprobs` is `jaxlc logprobs`."""

import sys

from jaxlc.cli import main_of

main = main_of("logprobs")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
