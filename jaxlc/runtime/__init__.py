"""Configures the environment, then starts JAX. Importing this package does not import JAX."""

from jaxlc.runtime.start import import_jax, start, start_training

__all__ = ["import_jax", "start", "start_training"]
