"""`python -m jaxlc.recommend` is `jaxlc recommend`."""

from jaxlc.cli import run_verb

if __name__ == "__main__":
    run_verb("recommend")
