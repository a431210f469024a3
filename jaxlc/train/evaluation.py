"""Evaluation during training: held-out loss, also by position, and the gain of full context.

Loss by position is a function of the number of earlier tokens of the same document. The gain of
full context is the loss with the last few hundred tokens as context minus the loss with the whole
document.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxlc.core import Update, count_text, no_progress, num_replicas, text
from jaxlc.core.files import Arrays
from jaxlc.data.sequences.loader import FiniteSequences, batches
from jaxlc.evals.document_loss import (
    MIN_DOCUMENTS,
    DocumentSums,
    Estimates,
    concatenate,
    position_edges,
    sum_documents,
)
from jaxlc.runtime.watchdog import wait_for_processes
from jaxlc.sharding.document_layout import natural_order
from jaxlc.step.batch import BATCH_SPEC, Batch
from jaxlc.step.step import TrainStep
from jaxlc.step.verify_compiled import verify_evaluation

LIMIT = 256  # limited context: at least this many earlier tokens, and fewer than twice as many
PIECE_TOKENS = 2 * LIMIT
OFFSETS = (0, LIMIT)  # one for each pass


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ContextGain:
    """Loss with limited context minus loss with full context, paired by token; positive if full
    context helps.

    Full context is the whole document before the target token, as far as it is in the sequence. For
    limited context, each document is cut into pieces of 512 tokens, which attend only to themselves
    and whose positions start at 0, and only the second halves of the pieces are scored. A second
    pass cuts 256 tokens earlier, which scores the other halves. So each token has 256 to 511
    earlier tokens as limited context, and the same target in both cases.

    Tokens with fewer than 512 earlier tokens do not count: their context is the same in both cases,
    and their gain is 0 by definition. A sliding window of 256 tokens would not limit the context:
    information passes from layer to layer, so L layers attend to L x 256 tokens.

    Pieces start in the middle of a document. A model that was trained on few such beginnings may
    have a higher loss for this reason alone; the gain includes this effect.
    """

    # Sums by document and position; `loss` is the sum of loss weight x (limited - full), and the
    # first edge is 512.
    documents: DocumentSums

    @property
    def overall(self) -> Estimates:
        """Gain in nats per token over all positions from 512 on; arrays of one entry."""
        return self.documents.overall

    def by_position(self) -> Arrays:
        """As `Evaluation.by_position`, with the column "gain", in nats per token, instead of
        "loss".
        """
        return self.documents.by_position("gain")

    def __str__(self) -> str:
        """The overall gain, its interval, and the number of documents."""
        (mean,), (low,), (high,), (num_documents,) = self.overall
        documents = count_text(int(num_documents), "document")
        if num_documents < MIN_DOCUMENTS:
            return (
                f"{mean:z.3f} nats per token, {documents} (fewer than {MIN_DOCUMENTS}: no interval)"
            )
        return f"{mean:z.3f} nats per token [{low:z.3f}, {high:z.3f}], {documents}"

    def __repr__(self) -> str:
        return f"ContextGain({self})"


def in_pieces(sequence: Arrays, offset: int) -> Arrays:
    """The sequence with its documents cut into pieces of PIECE_TOKENS tokens, `offset` tokens
    before each multiple. Each piece is a document: positions restart, and segment ids count the
    pieces.
    """
    positions = sequence["positions"]
    is_padding = sequence["segment_ids"] == 0
    shifted = positions + offset
    in_piece = np.where(shifted < PIECE_TOKENS, positions, shifted % PIECE_TOKENS)
    # the positions of own batches may have gaps, so a piece may lack its first token
    numbers = np.stack([sequence["segment_ids"], shifted // PIECE_TOKENS])
    is_first = np.diff(numbers, prepend=-1).any(0)
    pieces = np.cumsum(is_first & ~is_padding)
    return {
        **sequence,
        "positions": in_piece.astype(np.int32),
        "segment_ids": np.where(is_padding, 0, pieces).astype(np.int32),
    }


def scored(positions: np.ndarray, offset: int) -> np.ndarray:
    """bool: the tokens that the pass with `offset` scores; both passes score each position from 512
    on exactly once.
    """
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


class PositionSums(NamedTuple):
    """float64 [bins] each; bin b holds tokens with edges[b] <= position < edges[b + 1]."""

    weight: np.ndarray
    loss: np.ndarray  # sum of weight x loss, in nats


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Evaluation:
    """Held-out loss and its sums by document and position."""

    documents: DocumentSums
    num_sequences: int
    # None if it was not evaluated or does not apply: see `Evaluator.with_context_gain`.
    context_gain: ContextGain | None = None

    @property
    def loss(self) -> float:
        """Mean over all held-out target tokens, in nats."""
        return float(self.sums.loss.sum() / self.sums.weight.sum())

    @property
    def edges(self) -> np.ndarray:
        """Edges of the position bins, int64 [bins + 1]: numbers of earlier tokens of the same
        document.
        """
        return self.documents.edges

    @property
    def sums(self) -> PositionSums:
        """Sums over all documents, by position."""
        return PositionSums(self.documents.weight.sum(0), self.documents.loss.sum(0))

    def by_position(self) -> Arrays:
        """Loss by position as columns of equal length, for `pandas.DataFrame`.

        One row per bin of positions that has target tokens: first_position, last_position, tokens,
        documents, loss, low, high. The loss is in nats per token. low and high are the ends of its
        95% interval, of a bootstrap over documents; they are NaN for fewer than 5 documents
        (`estimate`).
        """
        return self.documents.by_position("loss")

    def __repr__(self) -> str:
        return (
            f"Evaluation(loss={self.loss:.3f}, {count_text(self.num_sequences, 'sequence')},"
            f" {count_text(self.documents.num_documents, 'document')}, {self.sums.weight.sum():,.0f} tokens)"
        )

    def _repr_html_(self) -> str:
        tables = [_html_table(repr(self), self.by_position())]
        if self.context_gain is not None:
            tables.append(_html_table(repr(self.context_gain), self.context_gain.by_position()))
        return "\n".join(tables)


class Evaluator:
    """Evaluates parameters on the first held-out sequences, the same in every evaluation."""

    def __init__(self, step: TrainStep, heldout: FiniteSequences, num_sequences: int):
        """
        Args:
          heldout: `heldout[i]` returns sequence i, in every process of the run.
          num_sequences: sequences to evaluate, at most those that `heldout` has.
        """
        self._step = step
        self._heldout = heldout
        self.num_sequences = min(num_sequences, heldout.num_sequences)
        self.edges = position_edges(step.config.data.seq_len)

    @cached_property
    def _token_losses(self) -> jax.stages.Compiled:
        """Returns the losses of all tokens to every process. The compiled evaluation must use the
        transport of the training step."""
        compiled = self._step.compile_evaluation()
        verify_evaluation(self._step, compiled)
        wait_for_processes("evaluation compiled")
        return compiled

    def has_targets(self) -> bool:
        """Whether a token of the sequences has a loss weight."""
        return any(self._heldout[i]["loss_weights"].any() for i in range(self.num_sequences))

    def __call__(self, params, progress: Update = no_progress) -> Evaluation:
        """Evaluates `params`; `progress` is called with the number of sequences done and in total."""
        losses = self._losses(params, lambda sequence: sequence, progress)
        sums = concatenate([sum_documents(*_in_loss(*pair), self.edges) for pair in losses])
        return Evaluation(documents=sums, num_sequences=self.num_sequences)

    def with_context_gain(
        self, params, evaluation: Evaluation, progress: Update = no_progress
    ) -> Evaluation:
        """Adds the gain of full context to the evaluation of `params`, with two more passes over
        the sequences.

        The gain stays None if sequences have at most 512 tokens or no document is longer. Limited
        context is evaluated as shorter documents, so it also stays None without
        attention.document_mask, with attention.shared_prefixes, and for a custom model, which may
        ignore the segment ids of the batch.
        """
        config = self._step.config
        attention = self._step.config.attention
        has_pieces = (
            attention.document_mask and not attention.shared_prefixes and self._step.model is None
        )
        if config.data.seq_len <= PIECE_TOKENS or not has_pieces:
            return evaluation
        limited = []
        for index, offset in enumerate(OFFSETS):
            losses = self._losses(
                params,
                functools.partial(in_pieces, offset=offset),
                lambda done, total, index=index: progress(
                    index * total + done, len(OFFSETS) * total
                ),
            )
            sums = [
                sum_documents(
                    sequence,
                    np.where(scored(sequence["positions"], offset), losses_S, 0.0),
                    self.edges,
                )
                for sequence, losses_S in losses
            ]
            limited.append(concatenate(sums))
        both_passes = dataclasses.replace(limited[0], loss=limited[0].loss + limited[1].loss)
        return dataclasses.replace(
            evaluation, context_gain=context_gain(evaluation.documents, both_passes)
        )

    def _losses(
        self, params, input_of: Callable[[dict], dict], progress: Update
    ) -> Iterator[tuple[Arrays, np.ndarray]]:
        """Yields each held-out sequence, and the loss of each of its tokens, float32 [S]; both in
        natural order.

        Args:
          input_of: returns a held-out sequence, or a variant of it with other positions and segment ids.
        """
        mesh = self._step.mesh
        order = self._step.sequence_order
        batch_size = num_replicas(mesh.shape)

        def arranged(i: int):
            # the first sequences again pad the last batch
            return order.arranged(input_of(self._heldout[i % self.num_sequences]))

        stream = batches(
            arranged,
            first_sequence=0,
            global_batch_size=batch_size,
            gradient_accumulation_steps=1,
            seq_len=self._step.config.data.seq_len,
            sharding=NamedSharding(mesh, BATCH_SPEC),
            prefetch_steps=1,
        )
        for begin, arrays in zip(range(0, self.num_sequences, batch_size), stream):
            losses = self._token_losses(params, jax.tree.map(lambda x: x[0], Batch(**arrays)))
            indices = range(begin, min(begin + batch_size, self.num_sequences))
            # the last batch may have more rows
            for i, losses_S in zip(indices, np.asarray(losses)):
                sequence = self._heldout[i]
                yield sequence, losses_S[natural_order(order.of(input_of(sequence)))]
            progress(len(indices) + begin, self.num_sequences)


def _in_loss(sequence: Arrays, losses_S: np.ndarray) -> tuple[Arrays, np.ndarray]:
    """A sequence and its losses; of the rows of its loss, if it has any: see `Batch.loss_tokens`."""
    if "loss_tokens" not in sequence:
        return sequence, losses_S
    tokens = sequence["loss_tokens"]
    segments = sequence["loss_segments"]
    positions = sequence["positions"][tokens]
    return {**sequence, "positions": positions, "segment_ids": segments}, losses_S[tokens]


def _html_table(title: str, columns: Arrays) -> str:
    rows = zip(*(map(_cell, column) for column in columns.values()))
    return text.table(list(columns), rows, caption=title, align="r" * len(columns))


def _cell(value) -> str:
    if isinstance(value, np.integer):
        return f"{value:,}"
    return f"{value:z.3f}" if np.isfinite(value) else ""
