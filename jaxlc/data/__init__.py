"""Training data: files -> documents -> token IDs -> token store on disk -> packed sequences ->
sharded batches.

`open` returns the data source of a config: corpus, traces, rollouts, or batches of the caller. The
state of the data pipeline is one number, the index of the next sequence. Sequence i is a pure
function of (sources, tokenizer, seed, i), so a run resumes with the same sequences on any mesh and
any number of processes.
"""

from typing import Any

import jaxlc.runtime.stderr  # noqa: F401  imports JAX without the notes of its CUDA plugin
from jaxlc.data.corpus import Corpus, open_corpus

__all__ = ["Corpus", "Examples", "open", "open_corpus", "show"]


def __getattr__(name: str) -> Any:
    """Imports names that use the readers of `jaxlc.posttrain`, which are built on modules of this
    package.
    """
    if name == "open":
        from jaxlc.data import data_sources

        return data_sources.open
    if name in ("Examples", "show"):
        from jaxlc.data import report

        return getattr(report, name)
    raise AttributeError(f"module 'jaxlc.data' has no attribute {name!r}")
