"""`python -m jaxlc.exporting` is `jaxlc export`."""

from jaxlc.cli import run_verb

if __name__ == "__main__":
    run_verb("export")
