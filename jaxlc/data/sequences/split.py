"""Splits a corpus into training and held-out documents."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxlc.core.errors import UserError
from jaxlc.data.tokens.store import TokenStore


class Split(NamedTuple):
    store: TokenStore  # that train_ids refers to: with one more document if a document's tail is held out
    train_ids: np.ndarray  # int64 [training documents]
    heldout_store: TokenStore  # that heldout_ids refers to: `store`, or that of separate evaluation sources
    heldout_ids: np.ndarray  # int64 [held-out documents]
    tail_tokens: int  # length of the held-out tail; 0 if entire documents are held out


def split_documents(
    store: TokenStore, eval_fraction: float, eval_store: TokenStore | None = None, setting: str = "data.sources"
) -> Split:
    """Holds out all documents of `eval_store`, or else those whose split hash is below `eval_fraction`, 0 to 1.

    The hash depends only on a document's name, so adding documents does not move others across the split. If it puts
    all documents on one side, as with a single large document, the last `eval_fraction` of the longest document is
    held out instead. It becomes a document of its own, so training never predicts its tokens.

    Args:
      setting: that names the corpus; in errors.
    Raises:
      UserError: the longest document is too short to hold out its tail.
    """
    if eval_store is not None:
        return Split(store, np.arange(store.num_documents), eval_store, np.arange(eval_store.num_documents), 0)
    is_heldout = store.split_hashes < eval_fraction
    if is_heldout.any() and not is_heldout.all():
        return Split(store, np.flatnonzero(~is_heldout), store, np.flatnonzero(is_heldout), 0)
    lengths = np.diff(store.offsets)
    longest = int(lengths.argmax())
    tail_tokens = math.ceil(lengths[longest] * eval_fraction)
    if min(tail_tokens, lengths[longest] - tail_tokens) < 2:  # one token to predict, and one to predict it from
        raise UserError(
            f"{setting}: too little text to hold out data.eval_fraction={eval_fraction}: {len(lengths)}"
            f" documents, the longest of {lengths[longest]} tokens; add documents or change data.eval_fraction"
        )
    store = replace(
        store,
        offsets=np.insert(store.offsets, longest + 1, store.offsets[longest + 1] - tail_tokens),
        split_hashes=np.insert(store.split_hashes, longest, store.split_hashes[longest]),
    )
    train_ids = np.delete(np.arange(store.num_documents), longest + 1)
    return Split(store, train_ids, store, np.array([longest + 1]), tail_tokens)
