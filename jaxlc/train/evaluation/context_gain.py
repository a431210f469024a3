"""The gain of full context: loss with the last few hundred tokens as context minus loss with the whole document."""

from dataclasses import dataclass

import numpy as np

from jaxlc.core.counts import count_text
from jaxlc.data.sequences.loader import Sequences
from jaxlc.train.evaluation.document_sums import MIN_DOCUMENTS, DocumentSums, Estimates

LIMIT = 256  # limited context: at least this many earlier tokens, and fewer than twice as many
PIECE_TOKENS = 2 * LIMIT
OFFSETS = (0, LIMIT)  # one for each pass


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ContextGain:
    """Loss with limited context minus loss with full context, paired by token; positive if full context helps.

    Full context is the whole document before the target token, as far as it is in the sequence. For limited context,
    each document is cut into pieces of 512 tokens, which attend only to themselves and whose positions start at 0, and
    only the second halves of the pieces are scored. A second pass cuts 256 tokens earlier, which scores the other
    halves. So each token has 256 to 511 earlier tokens as limited context, and the same target in both cases.

    Tokens with fewer than 512 earlier tokens do not count: their context is the same in both cases, and their gain is 0
    by definition. A sliding window of 256 tokens would not limit the context: information passes from layer to layer,
    so L layers attend to L x 256 tokens.

    Pieces start in the middle of a document. A model that was trained on few such beginnings may have a higher loss for
    this reason alone; the gain includes this effect.
    """

    # Sums by document and position; `loss` is the sum of loss weight x (limited - full), and the first edge is 512.
    documents: DocumentSums

    @property
    def overall(self) -> Estimates:
        """Gain in nats per token over all positions from 512 on; arrays of one entry."""
        return self.documents.overall

    def by_position(self) -> dict[str, np.ndarray]:
        """As `Evaluation.by_position`, with the column "gain", in nats per token, instead of "loss"."""
        return self.documents.by_position("gain")

    def __str__(self) -> str:
        """The overall gain, its interval, and the number of documents."""
        (mean,), (low,), (high,), (num_documents,) = self.overall
        documents = count_text(int(num_documents), "document")
        if num_documents < MIN_DOCUMENTS:
            return f"{mean:z.3f} nats per token, {documents} (fewer than {MIN_DOCUMENTS}: no interval)"
        return f"{mean:z.3f} nats per token [{low:z.3f}, {high:z.3f}], {documents}"

    def __repr__(self) -> str:
        return f"ContextGain({self})"


class Pieces:
    """Sequences whose documents are cut into pieces of PIECE_TOKENS tokens, `offset` tokens before each multiple."""

    def __init__(self, sequences: Sequences, offset: int):
        self._sequences, self._offset = sequences, offset

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Sequence i; each piece is a document: positions restart, and segment ids count the pieces."""
        sequence = self._sequences[i]
        positions, is_padding = sequence["positions"], sequence["segment_ids"] == 0
        shifted = positions + self._offset
        in_piece = np.where(shifted < PIECE_TOKENS, positions, shifted % PIECE_TOKENS)
        pieces = np.cumsum((in_piece == 0) & ~is_padding)
        return {
            **sequence,
            "positions": in_piece.astype(np.int32),
            "segment_ids": np.where(is_padding, 0, pieces).astype(np.int32),
        }


def scored(positions: np.ndarray, offset: int) -> np.ndarray:
    """bool: the tokens that the pass with `offset` scores; both passes score each position from 512 on exactly once."""
    return (positions >= PIECE_TOKENS) & ((positions + offset) % PIECE_TOKENS >= LIMIT)


def context_gain(full: DocumentSums, limited: DocumentSums) -> ContextGain | None:
    """The gain over the documents that have target tokens from position 512 on; None if there are none.

    Args:
      full: sums with full context.
      limited: sums of the same documents with limited context; `loss` contains the scored tokens only.
    """
    (first,) = np.flatnonzero(full.edges == PIECE_TOKENS)
    is_long = full.weight[:, first:].sum(1) > 0
    if not is_long.any():
        return None
    return ContextGain(
        documents=DocumentSums(
            edges=full.edges[first:],
            weight=full.weight[is_long, first:],
            loss=(limited.loss - full.loss)[is_long, first:],
        )
    )
