"""The corpus behind a config, and its rows as global arrays on the devices of all processes."""

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
from jaxlc.data.packing import PackedRows
from jaxlc.data.store import Progress, open_store
from jaxlc.data.tokenizers import Tokenizer, load_tokenizer

_ENDLESS = 2**62
_MAX_THREADS = 8  # building a row is mostly copying, which a few threads do as fast as memory allows


@dataclass(frozen=True, kw_only=True)
class Corpus:
    tokenizer: Tokenizer
    train: PackedRows
    heldout: PackedRows  # other documents, in one fixed order
    fingerprint: str  # equal where row i is the same for every i


class Rows(Protocol):
    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Row i, for any i >= 0, natural order, arrays [S]. Called from several threads."""


def open_corpus(config: DataConfig, progress: Progress | None = None) -> Corpus:
    """Reads, tokenizes (the first time; then it is cached), splits by document, and packs.

    A document is held out if the hash of its name says so, whatever else is in the corpus.

    Raises:
      UserError: sources, tokenizer or cache that cannot be used, or no document on one side of the split.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    store = open_store(config, tokenizer, progress)
    is_heldout = store.split_hashes < config.eval_fraction
    train_ids, heldout_ids = np.flatnonzero(~is_heldout), np.flatnonzero(is_heldout)
    if not len(train_ids) or not len(heldout_ids):
        raise UserError(
            f"data.eval_fraction {config.eval_fraction} leaves {len(train_ids)} documents to train on and"
            f" {len(heldout_ids)} held out; each needs at least one: change it, or add documents to data.sources"
        )
    identity = (store.fingerprint, tokenizer.fingerprint, config.seq_len, config.eval_fraction, config.seed)
    return Corpus(
        tokenizer=tokenizer,
        train=PackedRows(store, train_ids, config.seq_len, config.seed),
        heldout=PackedRows(store, heldout_ids, config.seq_len, seed=None),
        fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest(),
    )


def batches(
    rows: Rows,
    *,
    first_row: int,
    global_batch_size: int,
    gradient_accumulation_steps: int,
    sequence_order: np.ndarray,
    sharding: jax.sharding.NamedSharding,
    prefetch_steps: int,
) -> Iterator[dict[str, jax.Array]]:
    """Endless batches of global arrays [A, B, S]: A microbatches (`gradient_accumulation_steps`) of B rows of S tokens.

    Row b of microbatch a of step n is `rows[first_row + n * global_batch_size + a * B + b]`; position t of the layout
    holds its token `sequence_order[t]` (int [S]). `sharding` splits B and S, e.g. over (data, fsdp) and context.
    A process builds only the rows of which its devices hold a piece, in threads, `prefetch_steps` ahead (0: when
    asked for). Close the iterator, or drop it, to end the threads.
    """
    assert global_batch_size % gradient_accumulation_steps == 0, (global_batch_size, gradient_accumulation_steps)
    shape = (gradient_accumulation_steps, global_batch_size // gradient_accumulation_steps, len(sequence_order))
    here = sharding.addressable_devices_indices_map(shape).values()
    rows_B = sorted({b for _, slice_B, _ in here for b in range(*slice_B.indices(shape[1]))})
    spans_T = sorted({slice_T.indices(shape[2])[:2] for _, _, slice_T in here})  # (begin, end) in layout order
    local_rows = [(a, b) for a in range(gradient_accumulation_steps) for b in rows_B]

    def local_row(i: int) -> dict[str, list[np.ndarray]]:
        """The i-th row that this process builds, in pieces: one a span."""
        step, (a, b) = i // len(local_rows), local_rows[i % len(local_rows)]
        row = rows[first_row + step * global_batch_size + a * shape[1] + b]
        return {name: [array[sequence_order[slice(*span)]] for span in spans_T] for name, array in row.items()}

    def global_array(name: str, step: dict[tuple[int, int], dict[str, list[np.ndarray]]]) -> jax.Array:
        def piece(index: tuple[slice, slice, slice]) -> np.ndarray:
            range_A, range_B = (range(*index[dim].indices(shape[dim])) for dim in (0, 1))
            span = spans_T.index(index[2].indices(shape[2])[:2])
            return np.stack([np.stack([step[a, b][name][span] for b in range_B]) for a in range_A])

        return jax.make_array_from_callback(shape, sharding, piece)

    prefetch_rows = prefetch_steps * len(local_rows)
    options = grain.ReadOptions(num_threads=min(_MAX_THREADS, prefetch_rows), prefetch_buffer_size=prefetch_rows)
    built = iter(grain.MapDataset.range(_ENDLESS).map(local_row).to_iter_dataset(options))
    with contextlib.closing(built):  # also when this generator is closed or dropped
        while True:
            step = {at: next(built) for at in local_rows}
            yield {name: global_array(name, step) for name in step[local_rows[0]]}
