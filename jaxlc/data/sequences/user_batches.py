"""User-provided batches as sequences for the data loader."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from jaxlc.core.errors import UserError
from jaxlc.data.sequences.batch_arrays import ALWAYS
from jaxlc.data.sequences.loader import MAX_THREADS
from jaxlc.data.sequences.trace_batches import complete_traces

_REQUIRED = "tokens"


class EndOfBatches(Exception):
    """The iterable of batches ended; it has no batch for this step."""


class StreamedSequences:
    """The sequences of an iterable of batches, in order: sequence i is in batch i // batch_size.

    It is thread-safe. Only the latest batches are kept in memory, as many as the loader's threads may need at a time.
    Batches before the first requested sequence are skipped without a check, as after a resume.
    """

    def __init__(
        self,
        batches: Iterable[Mapping],
        *,
        batch_size: int,
        seq_len: int,
        vocab_size: int,
        prefetch_steps: int,
        dtypes: Mapping[str, type] = ALWAYS,
    ):
        """dtypes: of the arrays of a batch, see `array_dtypes`."""
        self._dtypes = dtypes
        self._batches: Iterator[Mapping] = iter(batches)
        self._batch_size, self._seq_len, self._vocab_size = batch_size, seq_len, vocab_size
        self._kept: deque[tuple[int, dict[str, np.ndarray]]] = deque(maxlen=prefetch_steps + MAX_THREADS + 2)
        self._num_read, self._lock = 0, threading.Lock()

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns sequence i in natural order, as `PackedSequences` does.

        Raises:
          EndOfBatches: the iterable has no batch with this sequence.
          UserError: the batch is invalid.
        """
        number, index = divmod(i, self._batch_size)
        with self._lock:
            while self._num_read <= number:
                try:
                    batch = next(self._batches)
                except StopIteration:
                    raise EndOfBatches(self._num_read) from None
                self._num_read += 1
                if self._num_read > number - self._kept.maxlen:
                    self._kept.append((self._num_read - 1, self._checked(batch)))
            batch = dict(self._kept)[number]
        return {name: array[index] for name, array in batch.items()}

    def _checked(self, batch: Mapping) -> dict[str, np.ndarray]:
        where = f"batch {self._num_read - 1}"
        return complete_batch(batch, (self._batch_size, self._seq_len), self._vocab_size, where, self._dtypes)


class ListedSequences:
    """The sequences of a finite list of batches, for evaluation.

    Raises:
      UserError: there are no batches, or one is invalid.
    """

    def __init__(
        self, batches: Iterable[Mapping], *, seq_len: int, vocab_size: int, dtypes: Mapping[str, type] = ALWAYS
    ):
        parts = [
            complete_batch(batch, (None, seq_len), vocab_size, f"evaluation batch {number}", dtypes)
            for number, batch in enumerate(batches)
        ]
        if not parts:
            raise UserError("eval_batches is empty: pass at least one batch, or None for no evaluation")
        self._arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        self.num_sequences = len(self._arrays[_REQUIRED])

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {name: array[i] for name, array in self._arrays.items()}


def complete_batch(
    batch: Mapping,
    shape: tuple[int | None, int],
    vocab_size: int,
    where: str,
    dtypes: Mapping[str, type] = ALWAYS,
) -> dict[str, np.ndarray]:
    """The arrays of a batch [B, S] in natural order; missing arrays are derived from the others.

    Args:
      batch: "tokens" is required; "segment_ids" (default: each sequence is one document; the tokens of a document are
        contiguous, 0 is padding), "positions" (default: counted within each document, where they increase), "targets"
        (default: the next token of the same document; any number where the loss weight is 0), and "loss_weights"
        (default: 1, but 0 on padding and at each document's last token). Those of post-training are in
        trace_batches.py.
      shape: the expected B (None: any) and S.
      where: names the batch in errors.
      dtypes: of the arrays of the batch, see `array_dtypes`.
    Returns:
      The arrays named in `dtypes`, [B, S].
    Raises:
      UserError: the batch lacks "tokens", has an unknown array, a wrong shape or type, a token or weighted target that
        is not in the vocabulary, a negative or infinite loss weight, a document that is not contiguous, or positions
        that do not increase.
    """
    expected = f"[{'any number of sequences' if shape[0] is None else shape[0]}, {shape[1]}]"
    if not isinstance(batch, Mapping) or _REQUIRED not in batch or set(batch) - set(dtypes):
        keys = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise UserError(
            f"invalid {where}: {keys}; expected a dictionary with 'tokens', and optionally"
            f" {', '.join(list(dtypes)[1:])}"
        )
    arrays = {name: np.asarray(batch[name]) for name in batch}
    tokens = arrays[_REQUIRED]
    for name, array in arrays.items():
        kind = np.integer if dtypes[name] is np.int32 else np.number
        if array.ndim != 2 or not array.size or array.shape[1] != shape[1] or shape[0] not in (None, array.shape[0]):
            raise UserError(f"invalid {where}: {name} has shape {list(array.shape)}, expected {expected}")
        if array.shape != tokens.shape or not np.issubdtype(array.dtype, kind):
            raise UserError(
                f"invalid {where}: {name} is {array.dtype}{list(array.shape)}, expected {np.dtype(dtypes[name])}"
                f" of the shape of tokens, {list(tokens.shape)}"
            )
    _check_ids("token", tokens, vocab_size, where)
    segments = arrays.setdefault("segment_ids", np.ones(tokens.shape, np.int32))
    continues = np.zeros(tokens.shape, bool)  # whether the next token belongs to the same document
    continues[:, :-1] = (segments[:, :-1] == segments[:, 1:]) & (segments[:, :-1] != 0)
    arrays.setdefault("positions", _positions(continues))
    _check_documents(segments, arrays["positions"], continues, where)
    arrays.setdefault("targets", np.where(continues, np.roll(tokens, -1, axis=1), 0))
    weights = arrays.setdefault("loss_weights", continues)
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise UserError(f"invalid {where}: loss_weights are not all finite and at least 0")
    # Targets without a weight may be any number, such as the -100 of other libraries.
    arrays["targets"] = np.where(weights > 0, arrays["targets"], 0)
    _check_ids("target", arrays["targets"], vocab_size, where, "; set loss_weights to 0 where there is no target")
    complete_traces(arrays, dtypes, where)
    return {name: arrays[name].astype(dtype) for name, dtype in dtypes.items()}


def _check_ids(name: str, ids: np.ndarray, vocab_size: int, where: str, advice: str = "") -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise UserError(
            f"invalid {where}: {name} {wrong}, expected 0 to {vocab_size - 1} (config.model.vocab_size){advice}"
        )


def _check_documents(segments: np.ndarray, positions: np.ndarray, continues: np.ndarray, where: str) -> None:
    """Checks what attention and per-document sharding rely on; arrays [B, S], `continues` as in `_positions`.

    Raises:
      UserError: the tokens of a document are not contiguous, or their positions do not increase.
    """
    is_first = segments != 0
    is_first[:, 1:] &= ~continues[:, :-1]
    rows, columns = np.nonzero(is_first)
    documents, counts = np.unique(np.stack([rows, segments[rows, columns]]), axis=1, return_counts=True)
    if (counts > 1).any():
        row, segment = documents[:, counts.argmax()].tolist()
        raise UserError(
            f"invalid {where}: the tokens with segment id {segment} of sequence {row} are not contiguous;"
            " give each document a segment id of its own"
        )
    is_wrong = continues[:, :-1] & (np.diff(positions, axis=1) <= 0)
    if is_wrong.any():
        row, column = np.argwhere(is_wrong)[0].tolist()
        raise UserError(
            f"invalid {where}: positions {positions[row, column]}, {positions[row, column + 1]} of segment id"
            f" {segments[row, column]} of sequence {row}: expected positions that increase within a document"
        )


def _positions(continues: np.ndarray) -> np.ndarray:
    """Number of earlier tokens of the same document, [B, S].

    Args:
      continues: bool [B, S], whether the next token belongs to the same document.
    """
    index = np.arange(continues.shape[1])
    starts = np.concatenate([np.ones((len(continues), 1), bool), ~continues[:, :-1]], axis=1)
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
