"""Training data: files -> documents -> token IDs -> token store on disk -> packed sequences -> sharded batches.

The state of the data pipeline is one number, the index of the next sequence. Sequence i is a pure function of
(sources, tokenizer, seed, i), so a run resumes with the same sequences on any mesh and any number of processes.
"""

from jaxlc.data.corpus import Corpus, open_corpus
from jaxlc.data.examples import Examples, show

__all__ = ["Corpus", "Examples", "open_corpus", "show"]
