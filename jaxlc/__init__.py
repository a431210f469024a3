"""jaxlc: train language models on very long sequences in JAX.

The public API: the packages `train` (`jaxlc.train.run`), `plan` (`jaxlc.plan.plan`), `sweep`
(`jaxlc.sweep.load`), `profile` (`jaxlc.profile.compare`), `data` (`jaxlc.data.show`), `attention`
and `config`, and the functions `attend`, `evaluate`, `export`, `generate`, `load`, `make_mesh` and
`start`. Each is imported when it is first used, so that commands print their help and their errors
without waiting for the import of JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxlc import interrupts

if TYPE_CHECKING:
    from jaxlc import attention, config, data, plan, profile, sweep, train
    from jaxlc.api import evaluate, export, generate, make_mesh, start
    from jaxlc.attention import attend
    from jaxlc.train.result import load

__version__ = "0.1.0"
__all__ = [
    "attend",
    "attention",
    "config",
    "data",
    "evaluate",
    "export",
    "generate",
    "load",
    "make_mesh",
    "plan",
    "profile",
    "start",
    "sweep",
    "train",
]

_MODULES = {  # of the functions; the other names are packages
    "attend": "jaxlc.attention",
    "evaluate": "jaxlc.api",
    "export": "jaxlc.api",
    "generate": "jaxlc.api",
    "load": "jaxlc.train.result",
    "make_mesh": "jaxlc.api",
    "start": "jaxlc.api",
}


interrupts.install_for_command()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        importlib.import_module("jaxlc.runtime.stderr")
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name in __all__ or name == "runtime":
        return importlib.import_module(f"jaxlc.{name}")
    raise AttributeError(f"module 'jaxlc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
