"""`python -m jaxlc.evals` is `jaxlc eval`."""

from jaxlc.cli import run_verb

if __name__ == "__main__":
    run_verb("eval")
