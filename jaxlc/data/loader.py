"""Opens the corpus of a config, and feeds its sequences to the devices of all processes as sharded arrays."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import grain
import jax
import numpy as np

from jaxlc.config.schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.data.packing import PackedSequences
from jaxlc.data.sources import PYTHON_STDLIB, list_files
from jaxlc.data.split import Split, split_documents
from jaxlc.data.store import Progress, TokenStore, open_store
from jaxlc.data.tokenizers import Tokenizer, load_tokenizer

_ENDLESS = 2**62
_MAX_THREADS = 8  # building a sequence is mostly copying; a few threads saturate the memory bandwidth


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A tokenized, split and packed corpus. Sizes are properties of `train` and `heldout`: `num_documents`, and per
    epoch `num_tokens` and `num_sequences`."""

    tokenizer: Tokenizer
    train: PackedSequences
    heldout: PackedSequences  # other documents or the tail of one, in the same order in every epoch
    fingerprint: str  # equal for two corpora if sequence i is the same for every i
    warnings: tuple[str, ...] = ()  # one line each, for the caller to print once per run


class Sequences(Protocol):
    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns sequence i, for any i >= 0, in natural order, arrays [S]. Called from several threads."""


def open_corpus(config: DataConfig, progress: Progress | None = None) -> Corpus:
    """Reads and tokenizes the sources (once, then they are cached), splits them by document, and packs them.

    Raises:
      UserError: the sources, the tokenizer, the cache or data.eval_fraction cannot be used.
    """
    if not 0 < config.eval_fraction < 1:
        raise UserError(
            f"invalid value {config.eval_fraction} for data.eval_fraction: expected more than 0 and less than 1;"
            " training ends with an evaluation on held-out text, so use a small value such as 0.01"
        )
    tokenizer = load_tokenizer(config.tokenizer)
    files, num_duplicates = list_files(config.sources)
    store = open_store(files, config, tokenizer, progress)
    split = split_documents(store, config.eval_fraction)
    identity = (store.fingerprint, tokenizer.fingerprint, config.seq_len, config.eval_fraction, config.seed)
    return Corpus(
        tokenizer=tokenizer,
        train=PackedSequences(split.store, split.train_ids, config.seq_len, config.seed),
        heldout=PackedSequences(split.store, split.heldout_ids, config.seq_len, seed=None),
        fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest(),
        warnings=tuple(_warnings(config, num_duplicates, store, split)),
    )


def _warnings(config: DataConfig, num_duplicates: int, store: TokenStore, split: Split) -> Iterator[str]:
    if num_duplicates:
        yield f"data.sources: duplicate files: {num_duplicates:,}; each file is used once per epoch"
    invalid = store.invalid_utf8
    if invalid.num_documents and config.sources != (
        PYTHON_STDLIB,
    ):  # Python's library has test files in other encodings
        yield (
            f"data.sources: documents that are not valid UTF-8: {invalid.num_documents:,} of {store.num_documents:,}"
            f" (invalid characters: {invalid.num_characters:,}, first in {invalid.first_document!r});"
            " convert them to UTF-8"
        )
    if split.tail_tokens:
        yield (
            f"data.sources: too few documents ({store.num_documents:,}) for a split by document: the last"
            f" {split.tail_tokens:,} tokens of the longest document are held out"
        )


def batches(
    sequences: Sequences,
    *,
    first_sequence: int,
    global_batch_size: int,
    gradient_accumulation_steps: int,
    sequence_order: np.ndarray,
    sharding: jax.sharding.NamedSharding,
    prefetch_steps: int,
) -> Iterator[dict[str, jax.Array]]:
    """Yields endless batches of global arrays [A, B, S]: A microbatches of B sequences of S tokens each.

    Sequence b of microbatch a of step n is `sequences[first_sequence + n * global_batch_size + a * B + b]`; position t
    of the layout holds its token `sequence_order[t]` (int [S]). `sharding` shards B and S, e.g. over (data, fsdp) and
    context. A process builds only the sequences of which its devices hold a shard, in threads, `prefetch_steps` steps
    ahead (0: on demand). Closing or dropping the iterator ends the threads.
    """
    assert global_batch_size % gradient_accumulation_steps == 0, (global_batch_size, gradient_accumulation_steps)
    shape = (gradient_accumulation_steps, global_batch_size // gradient_accumulation_steps, len(sequence_order))
    local_indices = sharding.addressable_devices_indices_map(shape).values()
    local_B = sorted({b for _, slice_B, _ in local_indices for b in range(*slice_B.indices(shape[1]))})
    spans_T = sorted({slice_T.indices(shape[2])[:2] for _, _, slice_T in local_indices})  # (begin, end), layout order
    local_sequences = [(a, b) for a in range(gradient_accumulation_steps) for b in local_B]

    def local_spans(i: int) -> dict[str, list[np.ndarray]]:
        """The spans of the i-th sequence that this process builds, in layout order."""
        step, (a, b) = i // len(local_sequences), local_sequences[i % len(local_sequences)]
        sequence = sequences[first_sequence + step * global_batch_size + a * shape[1] + b]
        return {name: [array[sequence_order[slice(*span)]] for span in spans_T] for name, array in sequence.items()}

    def global_array(name: str, step: dict[tuple[int, int], dict[str, list[np.ndarray]]]) -> jax.Array:
        def shard(index: tuple[slice, slice, slice]) -> np.ndarray:
            range_A, range_B = (range(*index[dim].indices(shape[dim])) for dim in (0, 1))
            span = spans_T.index(index[2].indices(shape[2])[:2])
            return np.stack([np.stack([step[a, b][name][span] for b in range_B]) for a in range_A])

        return jax.make_array_from_callback(shape, sharding, shard)

    num_prefetched = prefetch_steps * len(local_sequences)
    options = grain.ReadOptions(num_threads=min(_MAX_THREADS, num_prefetched), prefetch_buffer_size=num_prefetched)
    built = iter(grain.MapDataset.range(_ENDLESS).map(local_spans).to_iter_dataset(options))
    with contextlib.closing(built):  # also when this generator is closed or dropped
        while True:
            step = {at: next(built) for at in local_sequences}
            yield {name: global_array(name, step) for name in step[local_sequences[0]]}
