"""Evaluation during training: held-out loss, also by position, the gain of full context, and scores of tasks.

Loss by position is a function of the number of earlier tokens of the same document. It has 95% intervals, from sums per
document and position bin. The documents of an evaluation are the samples, not its tokens: the losses of the tokens of a
document are correlated, and intervals that treat tokens as independent are too narrow.

The gain of full context is the loss with the last few hundred tokens as context minus the loss with the whole document.

`jaxlc.evals` computes scores (config.evals). It is in a higher layer than this package, so it is imported by its name,
and only by runs with config.evals.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from scipy.special import ndtr, stdtrit

from jaxlc.core import html
from jaxlc.core.axes import DATA, FSDP
from jaxlc.core.errors import Unsupported
from jaxlc.core.text import Update, count_text, no_progress
from jaxlc.data.sequences.loader import Sequences, batches
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.runtime.watchdog import wait_for_processes
from jaxlc.sharding.document_layout import natural_order
from jaxlc.step.batch import BATCH_SPEC, Batch
from jaxlc.step.step import TrainStep
from jaxlc.step.verify_compiled import verify_evaluation

MIN_DOCUMENTS = 5  # a mean over fewer documents has no interval
_NUM_RESAMPLES = 2000
_MAX_COUNTS = 4_000_000  # resampled document counts that are in memory at one time


class Estimates(NamedTuple):
    """Arrays of equal length, one entry per mean."""

    mean: np.ndarray  # float64
    low: np.ndarray  # float64: ends of the 95% interval; NaN with fewer than MIN_DOCUMENTS documents
    high: np.ndarray
    documents: np.ndarray  # int64: number of documents with target tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentSums:
    """Sums over the target tokens of each document, by position: the number of earlier tokens of the document.

    A document is a piece of a packed sequence with one segment id. The parts of a document that is longer than a
    sequence are in several sequences and count as several documents. Documents without a target token do not count.
    """

    edges: np.ndarray  # int64 [bins + 1]; bin b holds positions edges[b] <= position < edges[b + 1]
    weight: np.ndarray  # float64 [documents, bins]: sum of loss weights
    loss: np.ndarray  # float64 [documents, bins]: sum of loss weight x loss, in nats

    def __post_init__(self):
        assert self.weight.shape == self.loss.shape == (len(self.weight), len(self.edges) - 1)

    @property
    def num_documents(self) -> int:
        return len(self.weight)

    @cached_property
    def overall(self) -> Estimates:
        """The mean loss per token over all positions; arrays of one entry."""
        return estimate(self.loss.sum(1, keepdims=True), self.weight.sum(1, keepdims=True))

    def by_position(self, name: str) -> dict[str, np.ndarray]:
        """Columns of equal length, for `pandas.DataFrame`; one row per bin that has target tokens.

        first_position, last_position    int64    the positions of the bin, both included
        tokens                           int64    sum of the loss weights
        documents                        int64    documents with target tokens in the bin
        `name`                           float64  mean in nats per token
        low, high                        float64  ends of its 95% interval, see `estimate`; NaN if it has none
        """
        return {
            "first_position": self.edges[:-1][self._is_used],
            "last_position": self.edges[1:][self._is_used] - 1,
            "tokens": np.rint(self.weight.sum(0)[self._is_used]).astype(np.int64),
            "documents": self._by_bin.documents,
            name: self._by_bin.mean,
            "low": self._by_bin.low,
            "high": self._by_bin.high,
        }

    @cached_property
    def _is_used(self) -> np.ndarray:
        return self.weight.sum(0) > 0

    @cached_property
    def _by_bin(self) -> Estimates:
        return estimate(self.loss[:, self._is_used], self.weight[:, self._is_used])


def position_edges(num_tokens: int) -> np.ndarray:
    """Edges of bins of half an octave: 0, 1, 2, 3, 4, 6, 8, 12, 16, ... up to the sequence length."""
    octaves = 2.0 ** np.arange(0, np.log2(max(2, num_tokens)) + 0.5, 0.5)
    edges = np.unique(np.concatenate([[0], np.round(octaves).astype(np.int64)]))
    return np.append(edges[edges < num_tokens], num_tokens)


def sum_documents(sequence: dict[str, np.ndarray], losses_S: np.ndarray, edges: np.ndarray) -> DocumentSums:
    """The sums of one sequence.

    Args:
      sequence: loss_weights, positions and segment_ids of its tokens, [S] each.
      losses_S: loss of each token in nats, in the same order; used only where the loss weight is not 0.
    """
    is_target = sequence["loss_weights"] > 0
    weights = sequence["loss_weights"][is_target].astype(np.float64)
    segments, documents = np.unique(sequence["segment_ids"][is_target], return_inverse=True)
    num_bins = len(edges) - 1
    bins = np.searchsorted(edges, sequence["positions"][is_target], side="right") - 1
    cells = documents * num_bins + bins

    def sum_cells(values: np.ndarray) -> np.ndarray:
        return np.bincount(cells, values, len(segments) * num_bins).reshape(len(segments), num_bins)

    return DocumentSums(edges=edges, weight=sum_cells(weights), loss=sum_cells(weights * losses_S[is_target]))


def concatenate(sums: Sequence[DocumentSums]) -> DocumentSums:
    """The sums of the documents of several sequences; at least one."""
    return DocumentSums(
        edges=sums[0].edges,
        weight=np.concatenate([part.weight for part in sums]),
        loss=np.concatenate([part.loss for part in sums]),
    )


def estimate(loss: np.ndarray, weight: np.ndarray, num_resamples: int = _NUM_RESAMPLES) -> Estimates:
    """Ratios sum(loss) / sum(weight) over documents, with 95% intervals of the bootstrap over documents.

    Each resample draws as many documents as there are, with replacement, and computes the ratios again. The interval
    is the expanded percentile interval of Hesterberg (2015, "What Teachers Should Know About the Bootstrap", section
    5.3, arXiv:1411.5279): the percentiles of a plain bootstrap interval are too narrow for few documents, so they are
    moved outwards by the ratio of Student's t to the normal distribution, and by sqrt(n / (n - 1)). n is the effective
    number of documents, sum(weight)^2 / sum(weight^2) (Kish), because a few long documents may have most tokens.

    In simulations with skewed losses and documents of unequal length this interval contains the true mean in 90% to
    93% of cases with 5 documents, in 93% to 97% with 8 or more, and in 85% to 88% with 4. Fewer than 5 documents
    therefore get no interval.

    Args:
      loss, weight: float64 [documents, means].
    """
    num_documents = (weight > 0).sum(0)
    low, high = np.full((2, loss.shape[1]), np.nan)
    resampled = _resampled_ratios(loss, weight, num_resamples)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = loss.sum(0) / weight.sum(0)
        effective = weight.sum(0) ** 2 / (weight**2).sum(0)
    for i in np.flatnonzero((num_documents >= MIN_DOCUMENTS) & np.isfinite(mean)):
        n = max(effective[i], 2.0)
        tail = ndtr(np.sqrt(n / (n - 1)) * stdtrit(n - 1, 0.025))  # approaches 0.025 for many documents
        low[i], high[i] = np.nanquantile(resampled[:, i], [tail, 1 - tail])  # NaN: resamples without weight
    return Estimates(mean, low, high, num_documents)


def _resampled_ratios(loss: np.ndarray, weight: np.ndarray, num_resamples: int) -> np.ndarray:
    """Ratios of resamples, float64 [resamples, means]; NaN where a resample has no weight."""
    ratios = [np.empty((0, loss.shape[1]))]
    for counts in _resampled_counts(len(loss), num_resamples):
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios.append((counts @ loss) / (counts @ weight))
    return np.concatenate(ratios)


def _resampled_counts(num_documents: int, num_resamples: int) -> Iterator[np.ndarray]:
    """Yields how often each document is in each resample, float64 [resamples of the chunk, documents]."""
    generator = np.random.default_rng(0)
    chunk = max(1, _MAX_COUNTS // max(1, num_documents))
    for begin in range(0, num_resamples if num_documents else 0, chunk):
        size = min(chunk, num_resamples - begin)
        drawn = generator.integers(num_documents, size=(size, num_documents))
        cells = drawn + num_documents * np.arange(size)[:, None]
        yield np.bincount(cells.ravel(), minlength=size * num_documents).reshape(size, -1).astype(np.float64)


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
        """Edges of the position bins, int64 [bins + 1]: numbers of earlier tokens of the same document."""
        return self.documents.edges

    @property
    def sums(self) -> PositionSums:
        """Sums over all documents, by position."""
        return PositionSums(self.documents.weight.sum(0), self.documents.loss.sum(0))

    def by_position(self) -> dict[str, np.ndarray]:
        """Loss by position as columns of equal length, for `pandas.DataFrame`.

        One row per bin of positions that has target tokens: first_position, last_position, tokens, documents, loss,
        low, high. The loss is in nats per token. low and high are the ends of its 95% interval, of a bootstrap over
        documents; they are NaN for fewer than 5 documents (`estimate`).
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


class FiniteSequences(Sequences, Protocol):
    num_sequences: int  # distinct sequences: those with indices from 0


class Evaluator:
    """Evaluates parameters on the first held-out sequences, the same in every evaluation."""

    def __init__(self, step: TrainStep, heldout: FiniteSequences, num_sequences: int):
        """
        Args:
          heldout: `heldout[i]` returns sequence i, in every process of the run.
          num_sequences: sequences to evaluate, at most those that `heldout` has.
        """
        self._step, self._heldout = step, heldout
        self.num_sequences = min(num_sequences, heldout.num_sequences)
        self.edges = position_edges(step.config.data.seq_len)

    @cached_property
    def _token_losses(self) -> jax.stages.Compiled:
        """Returns the losses of all tokens to every process. The compiled evaluation must use the transport of the
        training step."""
        compiled = self._step.compile_evaluation()
        verify_evaluation(self._step, compiled)
        wait_for_processes("evaluation compiled")
        return compiled

    def has_targets(self) -> bool:
        """Whether a token of the sequences has a loss weight."""
        return any(self._heldout[i]["loss_weights"].any() for i in range(self.num_sequences))

    def __call__(self, params, progress: Update = no_progress) -> Evaluation:
        """Evaluates `params`; `progress` is called with the number of sequences done and in total."""
        losses = self._losses(params, self._heldout, progress)
        sums = concatenate([sum_documents(sequence, losses_S, self.edges) for sequence, losses_S in losses])
        return Evaluation(documents=sums, num_sequences=self.num_sequences)

    def with_context_gain(self, params, evaluation: Evaluation, progress: Update = no_progress) -> Evaluation:
        """Adds the gain of full context to the evaluation of `params`, with two more passes over the sequences.

        The gain stays None if sequences have at most 512 tokens or no document is longer. Limited context is evaluated
        as shorter documents, so it also stays None without attention.document_mask, with attention.shared_prefixes,
        and for a custom model, which may ignore the segment ids of the batch.
        """
        config, attention = self._step.config, self._step.config.attention
        has_pieces = attention.document_mask and not attention.shared_prefixes and self._step.model is None
        if config.data.seq_len <= PIECE_TOKENS or not has_pieces:
            return evaluation
        limited = []
        for index, offset in enumerate(OFFSETS):
            losses = self._losses(
                params,
                Pieces(self._heldout, offset),
                lambda done, total, index=index: progress(index * total + done, len(OFFSETS) * total),
            )
            sums = [
                sum_documents(sequence, np.where(scored(sequence["positions"], offset), losses_S, 0.0), self.edges)
                for sequence, losses_S in losses
            ]
            limited.append(concatenate(sums))
        both_passes = dataclasses.replace(limited[0], loss=limited[0].loss + limited[1].loss)
        return dataclasses.replace(evaluation, context_gain=context_gain(evaluation.documents, both_passes))

    def _losses(
        self, params, inputs: Sequences, progress: Update
    ) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
        """Yields each held-out sequence, and the loss of each of its tokens, float32 [S]; both in natural order.

        Args:
          inputs: the held-out sequences, or a variant of them with other positions and segment ids.
        """
        mesh, order = self._step.mesh, self._step.sequence_order
        batch_size = mesh.shape[DATA] * mesh.shape[FSDP]
        stream = batches(
            _Repeated(inputs, self.num_sequences),
            first_sequence=0,
            global_batch_size=batch_size,
            gradient_accumulation_steps=1,
            seq_len=self._step.config.data.seq_len,
            arranged=order.arranged,
            sharding=NamedSharding(mesh, BATCH_SPEC),
            prefetch_steps=1,
        )
        for begin, arrays in zip(range(0, self.num_sequences, batch_size), stream):
            losses = self._token_losses(params, jax.tree.map(lambda x: x[0], Batch(**arrays)))
            indices = range(begin, min(begin + batch_size, self.num_sequences))
            for i, losses_S in zip(indices, np.asarray(losses)):  # the last batch may have more rows
                yield self._heldout[i], losses_S[natural_order(order.of(inputs[i]))]
            progress(len(indices) + begin, self.num_sequences)


class _Repeated:
    """Cycles through the first sequences; repeats pad the last batch."""

    def __init__(self, sequences: Sequences, num_sequences: int):
        self._sequences, self._num_sequences = sequences, num_sequences

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self._sequences[i % self._num_sequences]


def _html_table(title: str, columns: dict[str, np.ndarray]) -> str:
    rows = zip(*(map(_cell, column) for column in columns.values()))
    return html.table(list(columns), rows, caption=title, align="r" * len(columns))


def _cell(value) -> str:
    if isinstance(value, np.integer):
        return f"{value:,}"
    return f"{value:z.3f}" if np.isfinite(value) else ""


_MODULE = "jaxlc.evals.evaluate_run"


class NamedScore(NamedTuple):
    """A mean over examples or documents."""

    name: str  # TASK@LENGTH
    score: float  # percent, or nats per token
    standard_error: float  # NaN for one example
    num_examples: int
    seconds: float


class Scorer(Protocol):
    """Computes the scores of config.evals. Its programs are compiled once, for all evaluations of a stage."""

    def check(self) -> None:
        """Makes an example of each task, without a model.

        Raises:
          UserError: a file cannot be read, or a task has no example of the lengths.
        """

    def __call__(self, params: dict, step: int, workdir: Path, log: Callable[[str], None]) -> list[NamedScore]:
        """Evaluates the parameters of `step` and writes predictions, scores and figures to `workdir`/evals.

        Predictions of the same parameters that an interrupted evaluation has stored there are used. Every process of a
        run makes the same call.

        Args:
          log: prints a line.
        """


def make_scorer(step: TrainStep, tokenizer: Tokenizer) -> Scorer | None:
    """The scorer of a stage; None without config.evals.tasks.

    Raises:
      Unsupported: a custom model.
    """
    if not step.config.evals.tasks:
        return None
    if step.model is not None:
        raise Unsupported("config.evals.tasks is unsupported with a custom model, whose attention has no KV cache")
    return importlib.import_module(_MODULE).TrainingScorer(step, tokenizer)
