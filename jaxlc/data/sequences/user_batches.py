"""User-provided batches as sequences for the data loader, with the arrays of post-training that
they may have: shared prefixes, advantages, log-probabilities.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxlc.config import Config
from jaxlc.core import UserError
from jaxlc.core.files import Arrays
from jaxlc.data.sequences.loader import ALWAYS, MAX_THREADS, DataSource, Inputs, array_dtypes

# in the meta of a checkpoint instead of the fingerprint of a corpus
CALLER_BATCHES = "batches of the caller"
_TRACE_BATCHES_REQUIRED = (
    "advantages",
    "old_log_probs",
    "sampled_log_probs",
    "reference_log_probs",
    "experts",
    "teacher_tokens",
    "teacher_log_probs",
)


def complete_traces(arrays: Arrays, dtypes: Mapping[str, np.dtype], where: str) -> None:
    """Adds the arrays of post-training that `dtypes` names and `arrays` lacks; all are [B, S] in natural order.

    "prefix_ids" is the segment id of the prefix that a token's document continues (default: 0, none), and becomes those
    of all prefixes before it, [B, S, levels]; see `Batch`. "answer_weights" is 1 / number of weighted targets of the
    document (default: from the loss weights). "advantages", "old_log_probs", "sampled_log_probs" and
    "reference_log_probs" are values of the token's target; there is no default. "experts" are those of the token in
    each layer with experts, "teacher_tokens" and "teacher_log_probs" the teacher's next tokens; see `Batch`. With
    "loss_tokens" and "loss_segments", the arrays of the loss are rows, [B, S, levels]; without them, the rows of the
    loss are the tokens.

    Raises:
      UserError: an array without default is missing or not finite, a segment id is larger than S, or prefixes are
        invalid: unknown, of too many levels, or in another order than `_ancestors` expects.
    """
    for name in set(dtypes) & set(_TRACE_BATCHES_REQUIRED):
        if name not in arrays:
            expected = f"[{', '.join(map(str, ('B', 'S', *dtypes[name].shape)))}]"
            raise UserError(
                f"invalid {where}: no {name}, which config.posttrain needs; pass {dtypes[name].base}{expected}"
            )
        if not np.isfinite(arrays[name]).all():
            raise UserError(f"invalid {where}: {name} are not all finite")
    segments = arrays["segment_ids"]
    if set(dtypes) & {"prefix_ids", "answer_weights"}:
        expected = (
            "0 to the number of tokens with config.posttrain.loss or attention.shared_prefixes"
        )
        check_range("segment id", segments, segments.shape[1] + 1, where, expected)
    if "prefix_ids" in dtypes:
        parents = arrays.get("prefix_ids", np.zeros_like(segments))
        (num_levels,) = dtypes["prefix_ids"].shape
        arrays["prefix_ids"] = np.stack(
            [
                _ancestors(*rows, num_levels, f"{where}: sequence {number}")
                for number, rows in enumerate(zip(parents, segments))
            ]
        )
    if "loss_tokens" in dtypes:
        if "loss_tokens" not in arrays:
            places = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
            arrays |= dict(loss_tokens=places, loss_segments=segments)
        check_range("loss token", arrays["loss_tokens"], segments.shape[1], where)
        num_rows = arrays["loss_segments"][0].size
        check_range("loss segment", arrays["loss_segments"], num_rows + 1, where)
        for name in arrays.keys() & dtypes.keys():
            if dtypes[name].shape and arrays[name].ndim == 2:
                others = [(0, 0), (0, 0), (0, dtypes[name].shape[0] - 1)]
                arrays[name] = np.pad(arrays[name][..., None], others)
    if "answer_weights" in dtypes and "answer_weights" not in arrays:
        answers = arrays.get("loss_segments", segments)
        arrays["answer_weights"] = np.stack(
            [_answer_weights(*x) for x in zip(answers, arrays["loss_weights"])]
        )


def _answer_weights(segments: np.ndarray, weights: np.ndarray) -> np.ndarray:
    has_loss = weights > 0
    counts = np.bincount(segments[has_loss], minlength=len(segments) + 1)
    return np.where(has_loss, 1 / np.maximum(counts[segments], 1), 0)


def _ancestors(
    parents_S: np.ndarray, segments_S: np.ndarray, num_levels: int, where: str
) -> np.ndarray:
    """The segment ids of the prefixes before each token's document, [S, levels], the root first.

    Args:
      parents_S: the last of these prefixes; 0: none.
    Raises:
      UserError: a prefix is unknown, or there are too many before a document, or documents are not in the order of
        depth-first search: after each document those that continue it, each with all that continue that one.
    """
    is_first = np.diff(np.stack([segments_S, parents_S]), prepend=-1).any(0)
    documents = list(zip(segments_S[is_first].tolist(), parents_S[is_first].tolist()))
    known = dict(documents)
    path = []
    paths = np.zeros((len(segments_S) + 1, num_levels), np.int64)
    for number, (segment, parent) in enumerate(documents):
        if number and segment == documents[number - 1][0] or (parent and not segment):
            raise UserError(
                f"invalid {where} has several prefix_ids in one document, or in padding"
            )
        if parent and parent not in known:
            raise UserError(f"invalid {where} has no document {parent}, the prefix of {segment}")
        while parent and path and path[-1] != parent:
            path.pop()
        if parent and not path:
            raise UserError(
                f"invalid {where} has document {segment}, which continues {parent}, in another place: put documents"
                " that continue one prefix after it one after the other, each followed by those that continue it"
            )
        path = path if parent else []
        if len(path) > num_levels:
            raise UserError(
                f"invalid {where} has {len(path)} prefixes before document {segment}, expected at most {num_levels}"
                f" (config.attention.shared_prefixes); use --config.attention.shared_prefixes={len(path)}"
            )
        paths[segment, : len(path)] = path
        path.append(segment)
    return paths[segments_S]


_REQUIRED = "tokens"
_INT32_END = 2**31


class EndOfBatches(Exception):
    """The iterable of batches ended; it has no batch for this step."""


class StreamedSequences:
    """The sequences of an iterable of batches, in order: sequence i is in batch i // batch_size.

    It is thread-safe. Only the latest batches are kept in memory, as many as the loader's threads
    may need at a time. Batches before the first requested sequence are skipped without a check, as
    after a resume.
    """

    def __init__(
        self,
        batches: Iterable[Mapping],
        *,
        batch_size: int,
        seq_len: int,
        prefetch_steps: int,
        **options,
    ):
        """`options`: as of `complete_batch`."""
        self._batches: Iterator[Mapping] = iter(batches)
        self._shape = (batch_size, seq_len)
        self._options = options
        self._kept: deque[tuple[int, Arrays]] = deque(maxlen=prefetch_steps + MAX_THREADS + 2)
        self._num_read = 0
        self._lock = threading.Lock()

    def __getitem__(self, i: int) -> Arrays:
        """Returns sequence i in natural order, as `PackedSequences` does.

        Raises:
          EndOfBatches: the iterable has no batch with this sequence.
          UserError: the batch is invalid.
        """
        number, index = divmod(i, self._shape[0])
        with self._lock:
            while self._num_read <= number:
                try:
                    batch = next(self._batches)
                except StopIteration:
                    raise EndOfBatches(self._num_read) from None
                self._num_read += 1
                if self._num_read > number - self._kept.maxlen:
                    read = self._num_read - 1
                    complete = complete_batch(
                        batch, self._shape, where=f"batch {read}", **self._options
                    )
                    self._kept.append((read, complete))
            batch = dict(self._kept)[number]
        return {name: array[index] for name, array in batch.items()}


class ListedSequences:
    """The sequences of a finite list of batches, for evaluation.

    Raises:
      UserError: there are no batches, or one is invalid.
    """

    def __init__(self, batches: Iterable[Mapping], *, seq_len: int, **options):
        """`options`: as of `complete_batch`."""
        parts = [
            complete_batch(batch, (None, seq_len), where=f"evaluation batch {number}", **options)
            for number, batch in enumerate(batches)
        ]
        if not parts:
            raise UserError(
                "eval_batches is empty: pass at least one batch, or None for no evaluation"
            )
        self._arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        self.num_sequences = len(self._arrays[_REQUIRED])

    def __getitem__(self, i: int) -> Arrays:
        return {name: array[i] for name, array in self._arrays.items()}


@dataclass(frozen=True, kw_only=True)
class OwnBatches(DataSource):
    """The batches that the caller of `jaxlc.train.run` passes."""

    @classmethod
    def open(cls, config: Config, inputs: Inputs) -> "OwnBatches":
        """
        Raises:
          UserError: there are no batches, or the first one or one for evaluation is invalid.
        """
        options = dict(
            seq_len=config.data.seq_len,
            vocab_size=config.model.vocab_size,
            dtypes=array_dtypes(config),
            num_experts=config.model.experts.num_experts,
            absolute_positions=inputs.absolute_positions,
        )
        heldout = None
        evaluated = "no evaluation"
        if inputs.eval_batches is not None:
            heldout = ListedSequences(inputs.eval_batches, **options)
            evaluated = f"held out: {heldout.num_sequences:,} sequences"
        train = StreamedSequences(
            inputs.batches,
            batch_size=config.train.global_batch_size,
            prefetch_steps=config.data.prefetch_steps,
            **options,
        )
        try:
            train[0]  # raises an error before the step is compiled
        except EndOfBatches:
            raise UserError(
                "batches is empty: pass an iterable that starts with the batch of step 1"
            ) from None
        return cls(
            tokenizer=inputs.tokenizer,
            train=train,
            heldout=heldout,
            fingerprint=CALLER_BATCHES,
            description=f"{CALLER_BATCHES}; {evaluated}",
        )


def complete_batch(
    batch: Mapping,
    shape: tuple[int | None, int],
    vocab_size: int,
    where: str,
    dtypes: Mapping[str, np.dtype] = ALWAYS,
    *,
    num_experts: int = 0,
    absolute_positions: bool = False,
) -> Arrays:
    """The arrays of a batch [B, S] in natural order; missing arrays are derived from the others.

    Args:
      batch: "tokens" is required; "segment_ids" (default: each sequence is one document; the tokens of a document are
        contiguous, 0 is padding), "positions" (default: counted within each document, where they increase, on from the
        prefix that it continues), "targets"
        (default: the next token of the same document; any number where the loss weight is 0), and "loss_weights"
        (default: 1, but 0 on padding and at each document's last token). Those of post-training are in
        user_batches.py.
      shape: the expected B (None: any) and S.
      where: names the batch in errors.
      dtypes: of the arrays of the batch, see `array_dtypes`.
      num_experts: of the model, if the batch has recorded experts.
      absolute_positions: the model depends on more than the differences of positions: they remain as they are. The
        decoder does not, so its positions count from the first token of each document or of its prefix.
    Returns:
      The arrays named in `dtypes`, [B, S].
    Raises:
      UserError: the batch lacks "tokens", has an unknown array, a wrong shape or type, a token or weighted target that
        is not in the vocabulary, a negative or infinite loss weight, a document that is not contiguous, or positions
        that do not increase, or are S or more after the first one.
    """
    arrays = _arrays(batch, shape, where, dtypes)
    tokens = arrays[_REQUIRED]
    in_vocabulary = f"0 to {vocab_size - 1} (config.model.vocab_size)"
    check_range("token", tokens, vocab_size, where, in_vocabulary)
    segments = arrays.setdefault("segment_ids", np.ones(tokens.shape, np.int32))
    check_range("segment id", segments, _INT32_END, where)
    # the first tokens of documents, and all of padding
    is_first = np.ones(tokens.shape, bool)
    is_first[:, 1:] = (segments[:, 1:] != segments[:, :-1]) | (segments[:, 1:] == 0)
    _check_contiguous(segments, is_first, where)
    # whether the next token belongs to the same document
    continues = np.roll(~is_first, -1, axis=1)
    arrays.setdefault("targets", np.where(continues, np.roll(tokens, -1, axis=1), 0))
    has_rows = arrays["loss_segments"] > 0 if "loss_segments" in arrays else continues
    weights = arrays.setdefault("loss_weights", has_rows)
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise UserError(f"invalid {where}: loss_weights are not all finite and at least 0")
    if "loss_tokens" not in arrays:
        # Targets without a weight may be any number, such as the -100 of other libraries.
        arrays["targets"] = np.where(weights > 0, arrays["targets"], 0)
    advice = "; set loss_weights to 0 where there is no target"
    check_range("target", arrays["targets"], vocab_size, where, in_vocabulary + advice)
    complete_traces(arrays, dtypes, where)
    if "experts" in arrays:
        experts = arrays["experts"]
        is_missing = experts == np.iinfo(experts.dtype).max
        check_range("expert", np.where(is_missing, 0, experts), num_experts, where)
    if "teacher_tokens" in arrays:
        check_range("teacher token", arrays["teacher_tokens"] + 1, vocab_size + 1, where)
    arrays["positions"] = _positions(arrays, is_first, where, absolute=absolute_positions)
    return {name: arrays[name].astype(dtype.base) for name, dtype in dtypes.items()}


def _arrays(
    batch: Mapping, shape: tuple[int | None, int], where: str, dtypes: Mapping[str, np.dtype]
) -> Arrays:
    """The arrays of a batch. Raises UserError for an unknown or missing one, or a wrong shape or
    type.
    """
    if not isinstance(batch, Mapping) or _REQUIRED not in batch or set(batch) - set(dtypes):
        keys = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise UserError(
            f"invalid {where}: {keys}; expected a dictionary with 'tokens', and optionally"
            f" {', '.join(list(dtypes)[1:])}"
        )
    arrays = {name: np.asarray(batch[name]) for name in batch}
    has_rows = "loss_tokens" in batch
    if has_rows != ("loss_segments" in batch):
        raise UserError(f"invalid {where}: pass loss_tokens together with loss_segments")
    # None: any number of sequences, that of tokens
    num_sequences = shape[0] or np.atleast_1d(arrays[_REQUIRED]).shape[0] or 1
    for name, array in arrays.items():
        dtype = dtypes[name]
        # the caller names the last prefix only; without rows, arrays of the loss are those of tokens
        per_token = name == "prefix_ids" or not (
            has_rows or name.startswith(("experts", "teacher"))
        )
        expected = num_sequences, shape[1], *(() if per_token else dtype.shape)
        # an unsigned one has a value for no record
        kind = dict(i=np.integer, f=np.number).get(dtype.base.kind, dtype.base)
        if array.shape != expected or not np.issubdtype(array.dtype, kind):
            raise UserError(
                f"invalid {where}: {name} is {array.dtype}{list(array.shape)}, expected"
                f" {dtype.base}{list(expected)}"
            )
    return arrays


def check_range(name: str, values: np.ndarray, end: int, where: str, expected: str = "") -> None:
    """Raises UserError unless all integers are in 0 <= value < end. JAX clamps indices out of range
    without an error.

    Args:
      expected: the range in words; "" for that of `end`.
    """
    for wrong in (values.min(initial=0), values.max(initial=0)):
        if not 0 <= wrong < end:
            raise UserError(
                f"invalid {where}: {name} {wrong}, expected {expected or f'0 to {end - 1}'}"
            )


def _check_contiguous(segments: np.ndarray, is_first: np.ndarray, where: str) -> None:
    """Raises UserError if the tokens of a document are not contiguous; attention and per-document
    sharding rely on it.

    Arrays [B, S]; `is_first` as in `_positions`.
    """
    rows, columns = np.nonzero(is_first & (segments != 0))
    documents, counts = np.unique(
        np.stack([rows, segments[rows, columns]]), axis=1, return_counts=True
    )
    if (counts > 1).any():
        row, segment = documents[:, counts.argmax()].tolist()
        raise UserError(
            f"invalid {where}: the tokens with segment id {segment} of sequence {row} are not contiguous;"
            " give each document a segment id of its own"
        )


def _positions(
    arrays: Mapping[str, np.ndarray], is_first: np.ndarray, where: str, *, absolute: bool
) -> np.ndarray:
    """The positions of a batch, int64 [B, S]; 0 on padding, unless they are absolute.

    Args:
      arrays: of the batch, complete but for positions.
      is_first: bool [B, S], the first tokens of documents, and all of padding.
      absolute: see `complete_batch`.
    Raises:
      UserError: positions that do not increase, or are out of range.
    """
    segments = arrays["segment_ids"]
    prefixes = arrays.get("prefix_ids", np.zeros((1, 1, 1), int))
    index_S = np.arange(segments.shape[1])
    # index of the first token of the document
    first = np.maximum.accumulate(np.where(is_first, index_S, 0), axis=1)
    # indices of the first token of the first prefix, or of the document, and the end of the last
    # prefix; number of tokens of all prefixes
    root, prefix_end, num_before = first, first, 0
    if prefixes.any():
        # by segment id
        first_of, end_of = np.zeros((2, len(segments), segments.shape[1] + 1), np.int64)
        np.put_along_axis(first_of, segments, first, axis=1)
        # the last one remains
        np.put_along_axis(end_of, segments, np.broadcast_to(index_S + 1, first.shape), axis=1)
        first_of[:, 0] = end_of[:, 0] = 0
        flat = prefixes.reshape(len(segments), -1)
        starts, ends = (
            np.take_along_axis(x, flat, axis=1).reshape(prefixes.shape) for x in (first_of, end_of)
        )
        is_branch = prefixes[..., 0] > 0
        num_before = (ends - starts).sum(-1)
        root = np.where(is_branch, starts[..., 0], first)
        prefix_end = np.where(is_branch, ends.max(-1), first)
    if "positions" not in arrays:
        return np.where(segments != 0, index_S - first + num_before, 0)
    positions = arrays["positions"].astype(np.int64)
    # the token before, also that of the prefix
    previous = np.where(is_first, prefix_end - 1, index_S - 1)
    has_previous = (segments != 0) & (~is_first | (prefixes[..., 0] > 0))
    before = np.take_along_axis(positions, np.maximum(previous, 0), axis=1)
    is_wrong = has_previous & (before >= positions)
    if is_wrong.any():
        row, column = np.argwhere(is_wrong)[0].tolist()
        raise UserError(
            f"invalid {where}: positions {before[row, column]}, {positions[row, column]} of segment id"
            f" {segments[row, column]} of sequence {row}: expected positions that increase within a document, also from"
            " its prefix on"
        )
    if absolute:
        check_range("position", positions, _INT32_END, where)
        return positions
    positions = np.where(segments != 0, positions - np.take_along_axis(positions, root, axis=1), 0)
    if positions.max() >= len(index_S):
        raise UserError(
            f"invalid {where}: a position is {positions.max():,} after the first one of its document: expected at most"
            f" {len(index_S) - 1:,}; set config.data.seq_len larger than the distance"
        )
    return positions
