"""jaxlc: train language models on very long sequences in JAX.

Rooms are imported on first use, so `import jaxlc` starts neither JAX nor a GPU: what must be set before JAX
starts (see `jaxlc.runtime`) still can be.
"""

import importlib

__version__ = "0.1.0"
_ROOMS = (
    "attention", "bench", "config", "core", "data", "kernels", "models", "plan", "program", "runtime", "sharding",
    "train",
)  # fmt: skip


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f"jaxlc.{name}")
    raise AttributeError(f"module 'jaxlc' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_ROOMS])
