"""Ranks meshes, strategies, remat policies and transports by the speed of the training step.

Command line: `python -m jaxlc.sweep`. `load` reads the results of a sweep; `jaxlc.sweep.runner` runs one from Python.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxlc.sweep.stored import Ranking

__all__ = ["load"]


def load(path: str | Path) -> "Ranking":
    """The results of a finished or interrupted sweep, best first. Print them, or show them in a notebook.

    Args:
      path: the directory of the sweep (`jaxlc sweep --out`), or its points.jsonl.
    Raises:
      UserError: there are no points.
    """
    from jaxlc.sweep import stored  # imports rich and more, which a worker of a sweep does not need

    return stored.load(path)


def __dir__() -> list[str]:
    return list(__all__)
