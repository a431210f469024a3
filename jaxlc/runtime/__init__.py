"""What must happen before JAX starts. Imports no jax until one of its functions is called."""

from jaxlc.runtime.start import import_jax, start

__all__ = ["import_jax", "start"]
