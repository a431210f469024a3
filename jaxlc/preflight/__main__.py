"""`python -m jaxlc.preflight` is `jaxlc preflight`."""

from jaxlc.cli import run_verb

if __name__ == "__main__":
    run_verb("preflight")
