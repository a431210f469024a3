"""`python -m jaxlc.profile` is `jaxlc profile`."""

from jaxlc.cli import run_verb

if __name__ == "__main__":
    run_verb("profile")
