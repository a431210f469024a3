"""Documents on disk -> token ids -> a memory-mapped store -> packed rows -> batches spread over the devices.

The whole state of the data is one number, the index of the next row: row i is a pure function of (corpus,
tokenizer, seed, i), so any mesh and any number of processes go on with the same rows.
"""

from jaxlc.data.loader import Corpus, batches, open_corpus

__all__ = ["Corpus", "batches", "open_corpus"]
