"""`python -m jaxlc.generation` is `jaxlc generate`."""

from jaxlc.cli import run_verb

if __name__ == "__main__":
    run_verb("generate")
