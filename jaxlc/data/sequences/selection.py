"""Selects the documents of a source: filters and weights by length, and the pool that they are packed in."""

import hashlib

import numpy as np

from jaxlc.config.data_schema import SourceConfig
from jaxlc.data.sequences.packing import PackedSequences
from jaxlc.data.tokens.store import TokenStore


def packed_source(
    store: TokenStore, document_ids: np.ndarray, source: SourceConfig, seq_len: int, seed: int | None
) -> PackedSequences | None:
    """Packs the documents that `source` selects; None if it selects none.

    Args:
      document_ids: int64, documents of `store`.
      seed: data.seed; None: the same order in every epoch.
    """
    lengths = store.offsets[document_ids + 1] - store.offsets[document_ids]
    selected = np.repeat(document_ids, num_copies(store, document_ids, lengths, source, seq_len))
    if not len(selected):
        return None
    return PackedSequences(
        store,
        selected,
        seq_len,
        None if seed is None else source_seed(seed, source.name),
        chunk_tokens=source.chunk_tokens,
        max_document_tokens=seq_len if overlong_rule(source) == "truncate" else 0,
        is_full_length=source.pool == "full_length",
        weighs_answers_equally=source.answer_weights == "answer",
    )


def num_copies(
    store: TokenStore, document_ids: np.ndarray, lengths: np.ndarray, source: SourceConfig, seq_len: int
) -> np.ndarray:
    """How often each document occurs in an epoch, int64 [documents]: 0 if it is not used.

    A weight of 2.5 gives each document 2 copies, and one more to the half of the documents with the smallest hashes of
    their names among those of their length class.
    """
    min_tokens = max(source.min_tokens, seq_len if source.pool == "full_length" else 0)
    is_used = lengths >= min_tokens
    if source.max_tokens:
        is_used &= lengths <= source.max_tokens
    if overlong_rule(source) == "drop":
        is_used &= lengths <= seq_len
    copies = is_used.astype(np.int64)
    classes = np.searchsorted(np.array(source.length_limits, np.int64), lengths, side="right")
    for index, weight in enumerate(source.length_weights):
        members = np.flatnonzero(is_used & (classes == index))
        copies[members] = int(weight)
        num_more = round((weight - int(weight)) * len(members))
        by_hash = np.argsort(store.split_hashes[document_ids[members]], kind="stable")
        copies[members[by_hash[:num_more]]] += 1
    return copies


def overlong_rule(source: SourceConfig) -> str:
    """What happens to documents longer than a sequence: cut, truncate or drop."""
    if source.overlong == "auto":
        return "drop" if source.has_chats else "cut"
    return source.overlong


def source_seed(seed: int, name: str) -> int:
    """A seed of its own for each source, so that sources of equal size have different orders."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:4])
