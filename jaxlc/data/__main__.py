"""`python -m jaxlc.data` is `jaxlc data`."""

from jaxlc.cli import run_verb

if __name__ == "__main__":
    run_verb("data")
