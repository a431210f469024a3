"""What must happen before JAX starts. Imports no jax until `start` is called."""

from jaxlc.runtime.start import start

__all__ = ["start"]
