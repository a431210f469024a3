"""Loss of documents at an exact length: by position, of the last tokens, and the gain of full
context.

The documents have at least the length and are cut to it, so every position has the same documents.
Means over tokens have 95% intervals of a bootstrap over documents (`estimate`). The documents of an
evaluation are the samples, not its tokens: the losses of the tokens of a document are correlated,
and intervals that treat tokens as independent are too narrow.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlc.config import EvalsConfig
from jaxlc.config.checks.stage_checks import LOSS, num_last_tokens, used_limits
from jaxlc.core import UserError
from jaxlc.core.files import Arrays, read_json_lines, sha256_of
from jaxlc.data.texts.documents import Document, Fields, Notes, read_documents
from jaxlc.data.texts.sources import list_files
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.evals.predictions import Predictions, ScoreRow, read_scores, score_of

MIN_DOCUMENTS = 5  # a mean over fewer documents has no interval
_NUM_RESAMPLES = 2000
_MAX_COUNTS = 4_000_000  # resampled document counts that are in memory at one time


class Estimates(NamedTuple):
    """Arrays of equal length, one entry per mean."""

    mean: np.ndarray  # float64
    # float64: ends of the 95% interval; NaN with fewer than MIN_DOCUMENTS documents
    low: np.ndarray
    high: np.ndarray
    documents: np.ndarray  # int64: number of documents with target tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentSums:
    """Sums over the target tokens of each document, by position: the number of earlier tokens of
    the document.

    A document is a piece of a packed sequence with one segment id. The parts of a document that is
    longer than a sequence are in several sequences and count as several documents. Documents
    without a target token do not count.
    """

    edges: np.ndarray  # int64 [bins + 1]; bin b holds positions edges[b] <= position < edges[b + 1]
    weight: np.ndarray  # float64 [documents, bins]: sum of loss weights
    loss: np.ndarray  # float64 [documents, bins]: sum of loss weight x loss, in nats

    @property
    def num_documents(self) -> int:
        return len(self.weight)

    @cached_property
    def overall(self) -> Estimates:
        """The mean loss per token over all positions; arrays of one entry."""
        return estimate(self.loss.sum(1, keepdims=True), self.weight.sum(1, keepdims=True))

    def by_position(self, name: str) -> Arrays:
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


def sum_documents(sequence: Arrays, losses_S: np.ndarray, edges: np.ndarray) -> DocumentSums:
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

    return DocumentSums(
        edges=edges, weight=sum_cells(weights), loss=sum_cells(weights * losses_S[is_target])
    )


def concatenate(sums: Sequence[DocumentSums]) -> DocumentSums:
    """The sums of the documents of several sequences; at least one."""
    return DocumentSums(
        edges=sums[0].edges,
        weight=np.concatenate([part.weight for part in sums]),
        loss=np.concatenate([part.loss for part in sums]),
    )


def estimate(
    loss: np.ndarray, weight: np.ndarray, num_resamples: int = _NUM_RESAMPLES
) -> Estimates:
    """Ratios sum(loss) / sum(weight) over documents, with 95% intervals of the bootstrap over
    documents.

    Each resample draws as many documents as there are, with replacement, and computes the ratios
    again. The interval is the expanded percentile interval of Hesterberg (2015, "What Teachers
    Should Know About the Bootstrap", section 5.3, arXiv:1411.5279): the percentiles of a plain
    bootstrap interval are too narrow for few documents, so they are moved outwards by the ratio of
    Student's t to the normal distribution, and by sqrt(n / (n - 1)). n is the effective number of
    documents, sum(weight)^2 / sum(weight^2) (Kish), because a few long documents may have most
    tokens.

    In simulations with skewed losses and documents of unequal length this interval contains the
    true mean in 90% to 93% of cases with 5 documents, in 93% to 97% with 8 or more, and in 85% to
    88% with 4. Fewer than 5 documents therefore get no interval.

    Args:
      loss, weight: float64 [documents, means].
    """
    num_documents = (weight > 0).sum(0)
    low, high = np.full((2, loss.shape[1]), np.nan)
    # Ratios of resamples, float64 [resamples, means]; NaN where a resample has no weight.
    ratios = [np.empty((0, loss.shape[1]))]
    for counts in _resampled_counts(len(loss), num_resamples):
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios.append((counts @ loss) / (counts @ weight))
    resampled = np.concatenate(ratios)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = loss.sum(0) / weight.sum(0)
        effective = weight.sum(0) ** 2 / (weight**2).sum(0)
    for i in np.flatnonzero((num_documents >= MIN_DOCUMENTS) & np.isfinite(mean)):
        tail = _tail(max(effective[i], 2.0))
        # NaN: resamples without weight
        low[i], high[i] = np.nanquantile(resampled[:, i], [tail, 1 - tail])
    return Estimates(mean, low, high, num_documents)


def _tail(num_documents: float) -> float:
    """The share of resamples below the interval of `estimate`, which approaches 0.025."""
    # Not at the top: it takes a tenth of the time of all imports of a run, and few runs have intervals.
    from scipy.special import ndtr, stdtrit

    scale = np.sqrt(num_documents / (num_documents - 1))
    return ndtr(scale * stdtrit(num_documents - 1, 0.025))


def _resampled_counts(num_documents: int, num_resamples: int) -> Iterator[np.ndarray]:
    """Yields how often each document is in each resample, float64 [resamples of the chunk,
    documents].
    """
    generator = np.random.default_rng(0)
    chunk = max(1, _MAX_COUNTS // max(1, num_documents))
    for begin in range(0, num_resamples if num_documents else 0, chunk):
        size = min(chunk, num_resamples - begin)
        drawn = generator.integers(num_documents, size=(size, num_documents))
        cells = drawn + num_documents * np.arange(size)[:, None]
        yield (
            np.bincount(cells.ravel(), minlength=size * num_documents)
            .reshape(size, -1)
            .astype(np.float64)
        )


# tokens [B, T] -> losses of tokens 1 .. T - 1 in nats [B, T - 1]
TokenLosses = Callable[[np.ndarray], np.ndarray]
_SETTING = "documents"  # named in errors


class CutDocument(NamedTuple):
    """The first tokens of a document."""

    name: str
    ids: np.ndarray  # int32 [tokens]


@dataclass(frozen=True, kw_only=True)
class DocumentLosses:
    """Losses of documents of one length, in nats per token."""

    length: int
    by_position: DocumentSums  # position: number of earlier tokens
    last: np.ndarray  # float64 [documents]: mean loss of the last tokens
    # context limit -> the same of the same tokens with limited context
    limited: dict[int, np.ndarray]

    def gain(self, limit: int) -> np.ndarray:
        """Loss with limited context minus loss with full context of each document; positive if full
        context helps.
        """
        return self.limited[limit] - self.last


def read_cut_documents(
    settings: EvalsConfig, length: int, tokenizer: Tokenizer
) -> list[CutDocument]:
    """The first `settings.num_examples` documents with at least `length` tokens, cut to `length`.

    Raises:
      UserError: there is no such document, or a file cannot be read.
    """
    files = list_files(settings.documents, _SETTING).files
    fields = Fields(text=settings.text_field)
    found: list[CutDocument] = []
    for document in itertools.chain(*(read_documents(file, fields, Notes()) for file in files)):
        ids = _first_ids(document, length, tokenizer)
        if len(ids) == length:
            found.append(CutDocument(document.name, ids))
        if len(found) == settings.num_examples:
            break
    if not found:
        raise UserError(
            f"no document of {', '.join(settings.documents)} has {length:,} tokens: use a smaller length or longer"
            " documents"
        )
    return found


def _first_ids(document: Document, length: int, tokenizer: Tokenizer) -> np.ndarray:
    """At most `length` tokens; the rest of a long document is not tokenized."""
    parts = [np.empty(0, np.int32)]
    num_tokens = 0
    for piece in tokenizer.pieces(document.blocks):
        parts += tokenizer.encode_pieces([piece])
        num_tokens += len(parts[-1])
        if num_tokens >= length:
            break
    return np.concatenate(parts)[:length]


def losses_of(
    documents: Sequence[CutDocument],
    settings: EvalsConfig,
    token_losses: TokenLosses,
    predictions: Predictions,
) -> DocumentLosses:
    """The losses of documents of equal length. What `predictions` has is not computed again.

    Limited context: the model gets the last tokens and the `limit` tokens before them. A limit that
    is not smaller than the number of tokens before the last ones limits nothing, and is not used.
    """
    length = len(documents[0].ids)
    num_last = num_last_tokens(length)
    edges = position_edges(length - 1)
    limits = used_limits(settings, length)

    def make_rows(indices: list[int]) -> list[dict]:
        ids_BT = np.stack([documents[index].ids for index in indices])
        losses_BT = token_losses(ids_BT).astype(np.float64)
        limited = {
            limit: token_losses(ids_BT[:, -num_last - limit :])[:, -num_last:] for limit in limits
        }
        return [
            dict(
                document=documents[index].name,
                loss_sums=np.add.reduceat(losses_BT[i], edges[:-1]).tolist(),
                last_loss=losses_BT[i, -num_last:].mean(),
                limited_losses={
                    str(limit): losses[i].mean(dtype=np.float64)
                    for limit, losses in limited.items()
                },
            )
            for i, index in enumerate(indices)
        ]

    content = sha256_of(b"".join(document.ids.tobytes() for document in documents))
    header = dict(case=f"{LOSS}-{length}", documents=content, context_limits=limits)
    return _losses_of_rows(length, predictions.rows(header, len(documents), make_rows))


def stored_losses(directory: Path) -> list[DocumentLosses]:
    """The losses in the directory of a checkpoint that belong to the model of its scores, shorter
    lengths first.
    """
    models = {row.model for row in read_scores(directory)}
    stored = {}
    for path in directory.glob(f"{LOSS}-*.jsonl"):
        header, *rows = read_json_lines(path) or [{}]
        if rows and header.get("model") in models:
            stored[int(path.stem.partition("-")[2])] = rows
    return [_losses_of_rows(length, stored[length]) for length in sorted(stored)]


def _losses_of_rows(length: int, rows: Sequence[dict]) -> DocumentLosses:
    edges = position_edges(length - 1)
    weight = np.tile(np.diff(edges).astype(np.float64), (len(rows), 1))
    return DocumentLosses(
        length=length,
        by_position=DocumentSums(
            edges=edges, weight=weight, loss=np.array([row["loss_sums"] for row in rows])
        ),
        last=np.array([row["last_loss"] for row in rows]),
        limited={
            int(limit): np.array([row["limited_losses"][limit] for row in rows])
            for limit in rows[0]["limited_losses"]
        },
    )


def loss_rows(losses: DocumentLosses, documents: str, seconds: float) -> Iterator[ScoreRow]:
    """Yields the scores: loss, loss of the last tokens, and the gain for each context limit.

    Args:
      documents: their name.
      seconds: that the losses took.
    """
    num_last = num_last_tokens(losses.length)
    num_tokens = losses.by_position.weight[0].sum()
    values = {
        LOSS: losses.by_position.loss.sum(1) / num_tokens,
        f"{LOSS}_last_{num_last}": losses.last,
    }
    values |= {f"context_gain_{limit}": losses.gain(limit) for limit in losses.limited}
    for task, means in values.items():
        interval = estimate(means[:, None], np.ones((len(means), 1)))
        low, high = (
            None if np.isnan(end[0]) else float(end[0]) for end in (interval.low, interval.high)
        )
        yield ScoreRow(
            task=task,
            haystack=documents,
            length=losses.length,
            **score_of(means.tolist(), scale=1.0)._asdict(),
            seconds=round(seconds, 1),
            unit="nats",
            low=low,
            high=high,
        )
