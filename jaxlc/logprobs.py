"""`python -m jaxlc.logprobs` is `jaxlc logprobs`."""

from jaxlc.cli import run_verb

if __name__ == "__main__":
    run_verb("logprobs")
