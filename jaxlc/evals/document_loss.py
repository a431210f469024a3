"""Loss of documents at an exact length: by position, of the last tokens, and the gain of full context.

The documents have at least the length and are cut to it, so every position has the same documents. Means over tokens
have 95% intervals of a bootstrap over documents (`jaxlc.evals.document_sums.estimate`).
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxlc.config import EvalsConfig
from jaxlc.config.checks.eval_checks import LOSS, num_last_tokens, used_limits
from jaxlc.core.errors import UserError
from jaxlc.data.texts.documents import Document, Fields, Notes, read_documents
from jaxlc.data.texts.sources import list_files
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.evals.document_sums import DocumentSums, estimate, position_edges
from jaxlc.evals.predictions import ScoreRow, read_scores, resumed_rows, stored_header, stored_rows

TokenLosses = Callable[[np.ndarray], np.ndarray]  # tokens [B, T] -> losses of tokens 1 .. T - 1 in nats [B, T - 1]
_SETTING = "documents"  # named in errors


@dataclass(frozen=True, kw_only=True)
class CutDocument:
    """The first tokens of a document."""

    name: str
    ids: np.ndarray  # int32 [tokens]


@dataclass(frozen=True, kw_only=True)
class DocumentLosses:
    """Losses of documents of one length, in nats per token."""

    length: int
    by_position: DocumentSums  # position: number of earlier tokens
    last: np.ndarray  # float64 [documents]: mean loss of the last tokens
    limited: dict[int, np.ndarray]  # context limit -> the same of the same tokens with limited context

    def gain(self, limit: int) -> np.ndarray:
        """Loss with limited context minus loss with full context of each document; positive if full context helps."""
        return self.limited[limit] - self.last


def read_cut_documents(settings: EvalsConfig, length: int, tokenizer: Tokenizer) -> list[CutDocument]:
    """The first `settings.num_examples` documents with at least `length` tokens, cut to `length`.

    Raises:
      UserError: there is no such document, or a file cannot be read.
    """
    files = list_files(settings.documents, _SETTING).files
    fields = Fields(text=settings.text_field)
    documents = itertools.chain.from_iterable(read_documents(file, fields, Notes()) for file in files)
    cut = (CutDocument(name=document.name, ids=_first_ids(document, length, tokenizer)) for document in documents)
    long = list(itertools.islice((document for document in cut if len(document.ids) == length), settings.num_examples))
    if not long:
        raise UserError(
            f"no document of {', '.join(settings.documents)} has {length:,} tokens: use a smaller length or longer"
            " documents"
        )
    return long


def _first_ids(document: Document, length: int, tokenizer: Tokenizer) -> np.ndarray:
    """At most `length` tokens; the rest of a long document is not tokenized."""
    parts, num_tokens = [np.empty(0, np.int32)], 0
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
    directory: Path,
    identity: dict,
    replaces: bool = False,
) -> DocumentLosses:
    """The losses of documents of equal length; those that `directory` has are not computed again.

    Limited context: the model gets the last tokens and the `limit` tokens before them. A limit that is not smaller than
    the number of tokens before the last ones limits nothing, and is not used.

    Args:
      identity, replaces: as in `predictions.run_case`.
    """
    length = len(documents[0].ids)
    num_last, edges = num_last_tokens(length), position_edges(length - 1)
    limits = used_limits(settings, length)

    def make_rows(indices: list[int]) -> list[dict]:
        ids_BT = np.stack([documents[index].ids for index in indices])
        losses_BT = token_losses(ids_BT).astype(np.float64)
        limited = {limit: token_losses(ids_BT[:, -num_last - limit :])[:, -num_last:] for limit in limits}
        return [
            dict(
                document=documents[index].name,
                loss_sums=np.add.reduceat(losses_BT[i], edges[:-1]).tolist(),
                last_loss=losses_BT[i, -num_last:].mean(),
                limited_losses={str(limit): losses[i].mean(dtype=np.float64) for limit, losses in limited.items()},
            )
            for i, index in enumerate(indices)
        ]

    content = hashlib.sha256(b"".join(document.ids.tobytes() for document in documents)).hexdigest()
    header = dict(case=f"{LOSS}-{length}", documents=content, context_limits=limits, **identity)
    path, batch_size = directory / f"{LOSS}-{length}.jsonl", settings.batch_size
    rows = resumed_rows(path, header, len(documents), make_rows, batch_size=batch_size, replaces=replaces)
    return _losses_of_rows(length, rows)


def stored_losses(directory: Path) -> list[DocumentLosses]:
    """The losses in the directory of a checkpoint that belong to the model of its scores, shorter lengths first."""
    paths = {int(path.stem.partition("-")[2]): path for path in directory.glob(f"{LOSS}-*.jsonl")}
    models = {row.model for row in read_scores(directory)}
    texts = {length: paths[length].read_text() for length in sorted(paths)}
    stored = {length: list(stored_rows(x)) for length, x in texts.items() if stored_header(x).get("model") in models}
    return [_losses_of_rows(length, rows) for length, rows in stored.items() if rows]


def _losses_of_rows(length: int, rows: Sequence[dict]) -> DocumentLosses:
    edges = position_edges(length - 1)
    weight = np.tile(np.diff(edges).astype(np.float64), (len(rows), 1))
    return DocumentLosses(
        length=length,
        by_position=DocumentSums(edges=edges, weight=weight, loss=np.array([row["loss_sums"] for row in rows])),
        last=np.array([row["last_loss"] for row in rows]),
        limited={
            int(limit): np.array([row["limited_losses"][limit] for row in rows]) for limit in rows[0]["limited_losses"]
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
    values = {LOSS: losses.by_position.loss.sum(1) / num_tokens, f"{LOSS}_last_{num_last}": losses.last}
    values |= {f"context_gain_{limit}": losses.gain(limit) for limit in losses.limited}
    for task, means in values.items():
        count = len(means)
        interval = estimate(means[:, None], np.ones((count, 1)))
        low, high = (None if np.isnan(end[0]) else float(end[0]) for end in (interval.low, interval.high))
        error = means.std(ddof=1) / np.sqrt(count) if count > 1 else np.nan
        yield ScoreRow(
            task=task, haystack=documents, length=losses.length, score=float(means.mean()),
            standard_error=float(error), num_examples=count, seconds=round(seconds, 1), unit="nats", low=low, high=high,
        )  # fmt: skip


def evaluate_loss(
    settings: EvalsConfig,
    tokenizer: Tokenizer,
    token_losses: TokenLosses,
    directory: Path,
    identity: dict,
    replaces: bool = False,
) -> Iterator[ScoreRow]:
    """Yields the scores of the task `loss` at each length."""
    name = "+".join(Path(path).stem for path in settings.documents)
    for length in settings.lengths:
        start = time.monotonic()
        documents = read_cut_documents(settings, length, tokenizer)
        losses = losses_of(documents, settings, token_losses, directory, identity, replaces)
        yield from loss_rows(losses, name, time.monotonic() - start)
