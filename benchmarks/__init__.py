"""Benchmark programs and generators of documentation tables. Run them from the repository root; see README.md."""

from jaxlc import runtime

runtime.import_jax()  # before the programs import it, so that XLA's notes are not printed
