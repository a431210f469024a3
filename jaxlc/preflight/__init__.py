"""Checks the machines of a run before it starts: `jaxlc preflight`. Importing this package does not
import JAX.
"""
