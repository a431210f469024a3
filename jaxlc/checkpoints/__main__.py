"""`python -m jaxlc.checkpoints` is `jaxlc checkpoint`."""

from jaxlc.cli import run_verb

if __name__ == "__main__":
    run_verb("checkpoint")
