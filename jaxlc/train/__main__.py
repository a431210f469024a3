"""`python -m jaxlc.train` is `jaxlc train`."""

from jaxlc.cli import run_verb

if __name__ == "__main__":
    run_verb("train")
