"""`python -m jaxlc.plan` is `jaxlc plan`."""

from jaxlc.cli import run_verb

if __name__ == "__main__":
    run_verb("plan")
