"""cuDNN's attention for packed documents: a few calls per kernel call, with lengths and offsets from key ranges.

Calls
-----
The first calls take the longest documents, a loop the others, if there are any: the host waits for the condition of
each round. Ring steps with few documents (`AttentionSpec.few_documents`) have no loop. A sequence of one document is
one call of the same FLOPs as one with an implicit mask.

cuDNN writes the rows of the documents of a call only. `CallResults.joined` selects the call that has a row. Rows
without any, of fully masked queries and of keys that no query attends to, are 0 in out and gradients, -inf in the lse.

Operands
--------
A packed call computes attention for several documents without moving data. Each document is a rectangle: consecutive
queries, consecutive keys, and the places of both in their arrays. With a causal mask it is the lower triangle of a
square.

    own KV block         causal; a document's first query on the rank is its own first key
    other ring steps     all queries of a document have the same keys: a document is cut into zigzag pieces (lo, hi), so
                         both pieces attend to lo of an earlier rank, and hi attends to both pieces of a later rank

cuDNN pads: the lse of a call is [documents, N, T], and its backward has a float32 dq of [documents, T, N, H] as its
workspace, where T is the longest document that the call permits. Both shapes are static, documents are not. So a call
for documents of up to T / r tokens takes r x DOCUMENTS_PER_ROW of them: these sizes are the same for every r. `buckets`
are powers of 4 of r. Documents are sorted by bucket, and a call takes as many as it can, so a few calls compute a
typical sequence, and a loop of calls any number of documents.

With the order of per-document sharding, which limits the documents that two ranks share, two calls take all documents
of a ring step, and of a typical own block (`calls_for`).
"""

import functools
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc._jax_internals import cudnn_packed_backward, cudnn_packed_forward
from jaxlc.attention.contract import AttentionSpec, CallResults, KeyRanges
from jaxlc.core import Unsupported, scopes

DOCUMENTS_PER_ROW = 2  # cuDNN takes offsets only for more than one document per row of the batch
MIN_BUCKET_TOKENS = 128  # the block size of cuDNN's kernels
MAX_ELEMENTS = 2**31  # offsets are int32


class Bucket(NamedTuple):
    """The static sizes of a call: `num_rows` rows of `num_queries` queries and `num_keys` keys."""

    num_rows: int
    num_queries: int  # also the number of queries that a document may have
    num_keys: int
    documents_per_row: int = DOCUMENTS_PER_ROW

    @property
    def num_documents(self) -> int:
        """The number of documents of a call."""
        return self.num_rows * self.documents_per_row


def buckets(
    batch: int, num_queries: int, num_keys: int, min_tokens: int | None = None
) -> tuple[Bucket, ...]:
    """The sizes of calls for arrays [batch, num_queries, ...] and [batch, num_keys, ...], longest
    documents first.

    Args:
      min_tokens: of the smallest size. None: MIN_BUCKET_TOKENS.
    """
    sizes = []
    factor = 1
    while factor == 1 or (
        num_queries % factor == num_keys % factor == 0
        and min(num_queries, num_keys) >= factor * (min_tokens or MIN_BUCKET_TOKENS)
    ):
        sizes.append(Bucket(batch * factor, num_queries // factor, num_keys // factor))
        factor *= 4
    return tuple(sizes)


class Calls(NamedTuple):
    """The sizes of the calls for a block of queries and one of keys, longest documents first."""

    once: tuple[Bucket, ...]  # one call of each size
    repeated: tuple[Bucket, ...]  # a loop calls these while documents remain; (): none can remain

    @property
    def sizes(self) -> tuple[Bucket, ...]:
        """All sizes, without repetitions of the number of tokens."""
        smallest = self.once[-1].num_queries
        return (*self.once, *(size for size in self.repeated if size.num_queries < smallest))

    @property
    def begins(self) -> list[tuple[Bucket, int]]:
        """The calls outside of the loop, and the number of documents before each."""
        return list(
            zip(
                self.once,
                itertools.accumulate((size.num_documents for size in self.once), initial=0),
            )
        )

    @property
    def num_documents(self) -> int:
        """The number of documents of the calls outside of the loop."""
        return sum(size.num_documents for size in self.once)


def calls_for(
    batch: int,
    num_queries: int,
    num_keys: int,
    *,
    causal: bool,
    few_documents: bool,
    min_tokens: int | None = None,
) -> Calls:
    """The calls for a spec and arrays [batch, num_queries, ...] and [batch, num_keys, ...].

    With few documents, two calls take all documents of a ring step, and of a typical own block. At
    most three documents of a sequence have more than a quarter of the tokens, and 15 more than a
    sixteenth.
    """
    sizes = buckets(batch, num_queries, num_keys, min_tokens)
    if not few_documents or num_queries % 4 or num_keys % 4:
        return Calls(sizes[:1], sizes)
    quarter = Bucket(4 * batch, num_queries // 4, num_keys // 4, 3 if causal else 2)
    return Calls(
        (Bucket(batch, num_queries, num_keys, 3), quarter),
        (sizes[2:] or (quarter,)) if causal else (),
    )


class DocumentRows(NamedTuple):
    """The rows of R x M documents of a call; int32. Rows are indices of arrays [batch x tokens,
    ...].

    Unused documents have length 0 and start at the end.
    """

    q_length: jax.Array  # [R, M]
    kv_length: jax.Array
    # [R, M + 1]; the first R x M + 1 in row-major order count, and the last one is the end
    q_start: jax.Array
    kv_start: jax.Array

    def rows_at(self, bucket: Bucket, first, ends) -> "DocumentRows":
        """The documents of a call, from `first` on.

        Args:
          ends: the number of rows of q, and of k.
        """
        rows = [lax.dynamic_slice_in_dim(x, first, bucket.num_documents) for x in self]
        rows[2:] = (
            jnp.pad(x, (0, bucket.num_rows), constant_values=end) for x, end in zip(rows[2:], ends)
        )
        return DocumentRows(*(x.reshape(bucket.num_rows, -1) for x in rows))


class DocumentTable(NamedTuple):
    """The documents of a block of queries and one of keys, sorted by bucket; int32."""

    once: tuple[DocumentRows, ...]  # by call outside of the loop
    # [documents], [documents], ...: all documents, and as many unused ones as a call of the loop
    # can take.
    repeated: DocumentRows | None
    bucket_ends: jax.Array  # [buckets]: number of documents in this bucket and those before it
    # [batch x num_queries]: the document that a row belongs to; -1 for fully masked rows
    q_document: jax.Array
    q_row: jax.Array  # [batch x num_queries]: the index of the row in its document
    kv_document: jax.Array  # [batch x num_keys]

    @property
    def num_documents(self) -> jax.Array:
        return self.bucket_ends[-1]

    def bucket_of(self, document: jax.Array) -> jax.Array:
        """The index of the bucket of a document."""
        return (document >= self.bucket_ends[:-1]).sum()


def document_table(
    start_BT: jax.Array,
    end_BT: jax.Array,
    num_keys: int,
    calls: Calls,
    *,
    causal: bool,
    has_window: bool = False,
) -> DocumentTable:
    """The documents of the key ranges [start, end) of each query; start == end for fully masked rows.

    Args:
      calls: of `calls_for`.
      causal: a query at index t has the range [first, t + 1), where first is the index of its document's first query.
        Otherwise all queries of a document have the same range. It is not checked.
      has_window: instead, the ends of a document's ranges ascend by 1, and only its first query may have one key.
    """
    batch, num_queries = start_BT.shape
    sizes = calls.sizes
    has_keys_BT = start_BT < end_BT
    if has_window:
        steps_BT = end_BT - jnp.arange(num_queries)
        is_first_BT = (start_BT == end_BT - 1) | _differs_from_previous(steps_BT, steps_BT)
    elif causal:
        is_first_BT = start_BT == jnp.arange(num_queries)
    else:
        is_first_BT = _differs_from_previous(start_BT, end_BT)
    is_first_BT &= has_keys_BT
    ends_here_BT = jnp.pad(
        (is_first_BT | ~has_keys_BT)[:, 1:], ((0, 0), (0, 1)), constant_values=True
    )
    is_last_BT = has_keys_BT & ends_here_BT

    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    q_row_BT = rows * num_queries + jnp.arange(num_queries, dtype=jnp.int32)
    document_BT = jnp.cumsum(is_first_BT.reshape(-1), dtype=jnp.int32).reshape(start_BT.shape) - 1
    start_D2 = _compact(is_first_BT, document_BT, (q_row_BT, rows * num_keys + start_BT))
    end_D2 = _compact(is_last_BT, document_BT, (q_row_BT + 1, rows * num_keys + end_BT))
    length_D2 = end_D2 - start_D2
    num_documents = is_first_BT.sum(dtype=jnp.int32)

    # The index of each document's bucket; len(sizes) for unused entries, so that these come last.
    limits = jnp.array(
        [(size.num_queries, size.num_keys) for size in sizes[1:]], jnp.int32
    ).reshape(-1, 2)
    bucket_D = (length_D2[:, None] <= limits).all(-1).sum(1)
    bucket_D = jnp.where(jnp.arange(len(bucket_D)) < num_documents, bucket_D, len(sizes))
    sorted_D, bucket_ends = _counting_sort(bucket_D, len(sizes) + 1)
    capacity = max(calls.num_documents, *(size.num_documents for size in calls.repeated), 0)
    ends = jnp.array((batch * num_queries, batch * num_keys), jnp.int32)
    length_D2 = jnp.zeros((len(sorted_D) + capacity, 2), jnp.int32).at[sorted_D].set(length_D2)
    start_D2 = jnp.broadcast_to(ends, length_D2.shape).at[sorted_D].set(start_D2)
    start_D2 = jnp.where(length_D2 > 0, start_D2, ends)
    all_documents = DocumentRows(*length_D2.T, *start_D2.T)
    q_document = document_of_rows(
        all_documents.q_start, all_documents.q_length, batch * num_queries
    )
    return DocumentTable(
        tuple(all_documents.rows_at(*at, ends) for at in calls.begins),
        all_documents if calls.repeated else None,
        bucket_ends[:-1],
        q_document,
        jnp.where(
            q_document >= 0, jnp.arange(len(q_document)) - all_documents.q_start[q_document], 0
        ),
        document_of_rows(all_documents.kv_start, all_documents.kv_length, batch * num_keys),
    )


class PackedOperands(NamedTuple):
    """Operands of `cudnn_packed_forward`: int32, R rows of M documents."""

    q_lengths_RM: jax.Array
    kv_lengths_RM: jax.Array
    q_offsets: jax.Array  # [R, M + 1], in elements; the first R x M + 1 in row-major order count
    kv_offsets: jax.Array


def packed_operands(
    rows: DocumentRows, q_shape: tuple[int, ...], k_shape: tuple[int, ...]
) -> PackedOperands:
    """The operands of the call for these documents.

    Args:
      q_shape, k_shape: [B, T, N, H] and [B, S, K, H]; v has the shape of k; out, dout and dq have the shape of q.
    """
    return PackedOperands(
        rows.q_length,
        rows.kv_length,
        rows.q_start * math.prod(q_shape[2:]),
        rows.kv_start * math.prod(k_shape[2:]),
    )


def _differs_from_previous(start_BT: jax.Array, end_BT: jax.Array) -> jax.Array:
    """Whether a query has another range than the one before it; true for the first query."""
    differs_BT = (start_BT[:, 1:] != start_BT[:, :-1]) | (end_BT[:, 1:] != end_BT[:, :-1])
    return jnp.pad(differs_BT, ((0, 0), (1, 0)), constant_values=True)


def _compact(
    is_selected_BT: jax.Array, document_BT: jax.Array, values_BT: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """[documents, 2]: for each document, the two values of the one query that is selected; 0 for
    unused entries.
    """
    index = jnp.where(is_selected_BT, document_BT, is_selected_BT.size).reshape(-1)
    values = jnp.stack([x.reshape(-1) for x in values_BT], axis=1)
    return jnp.zeros((is_selected_BT.size, 2), jnp.int32).at[index].set(values, mode="drop")


def _counting_sort(key_D: jax.Array, num_keys: int) -> tuple[jax.Array, jax.Array]:
    """The index of each entry in the stable order by key, and the end of each key's entries.

    XLA's sort on a GPU needs more kernels for the few keys there are.
    """
    is_key_DK = (key_D[:, None] == jnp.arange(num_keys)).astype(jnp.int32)
    rank_DK = jnp.cumsum(is_key_DK, axis=0)
    end_K = jnp.cumsum(rank_DK[-1])
    begin_K = end_K - rank_DK[-1]
    return ((begin_K + rank_DK - 1) * is_key_DK).sum(1), end_K


def document_of_rows(start_D: jax.Array, length_D: jax.Array, num_rows: int) -> jax.Array:
    """[num_rows]: the document that a row belongs to, or -1. Documents do not overlap."""
    number_D = jnp.where(length_D > 0, jnp.arange(1, len(start_D) + 1, dtype=jnp.int32), 0)
    change = (
        jnp.zeros(num_rows + 1, jnp.int32)
        .at[start_D]
        .add(number_D)
        .at[start_D + length_D]
        .add(-number_D)
    )
    return jnp.cumsum(change, dtype=jnp.int32)[:-1] - 1


def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *table, spec: AttentionSpec
) -> CallResults:
    """(out_BTNH in q's dtype, lse_BNT float32).

    Args:
      table: of `document_table`, or the key ranges start_BT and end_BT that it is computed from.
      spec: with few_documents, the lse of ring steps is NaN if there are more.
    Raises:
      Unsupported: q or k has 2^31 elements or more, or the spec has a window.
    """
    _check(q_BTNH, k_BSKH, spec)
    block = Block.create(q_BTNH, k_BSKH, table, spec)
    settings = _settings(q_BTNH, spec)

    def call(bucket: Bucket, documents: DocumentRows):
        q, k, v = block.rows(bucket, q_BTNH, k_BSKH, v_BSKH)
        out, lse_DNT = cudnn_packed_forward(q, k, v, block.operands(documents), **settings)
        return out.reshape(q_BTNH.shape), lse_DNT

    def unpack(results, first):
        out_BTNH, lse_DNT = results
        return out_BTNH, block.unpack_lse(lse_DNT, first)

    return block.forward(call, unpack)


def backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    dout_BTNH: jax.Array,
    *table,
    spec: AttentionSpec,
) -> CallResults:
    """(dq, dk, dv) in q's dtype, without the gradient of the lse; out and dout in q's dtype.
    Otherwise as `forward`.
    """
    _check(q_BTNH, k_BSKH, spec)
    block = Block.create(q_BTNH, k_BSKH, table, spec)
    settings = _settings(q_BTNH, spec)

    def call(bucket: Bucket, documents: DocumentRows):
        q, k, v, out, dout = block.rows(bucket, q_BTNH, k_BSKH, v_BSKH, out_BTNH, dout_BTNH)
        operands = block.operands(documents)
        lse = block.pack_lse(lse_BNT, bucket, documents)
        results = cudnn_packed_backward(q, k, v, operands, out, lse, dout, **settings)
        return tuple(
            dx.reshape(x.shape) for dx, x in zip(results, (q_BTNH, k_BSKH, v_BSKH), strict=True)
        )

    return block.backward(call)


def _check(q_BTNH: jax.Array, k_BSKH: jax.Array, spec: AttentionSpec) -> None:
    """Raises Unsupported as `forward`."""
    if spec.window is not None:
        raise Unsupported(
            f"unsupported by attention kernel cudnn: window of {spec.window} tokens with packed documents"
            " (supported: no window)"
        )
    num_elements = max(q_BTNH.size, k_BSKH.size)
    if num_elements >= MAX_ELEMENTS:
        raise Unsupported(
            f"unsupported by attention kernel cudnn: packed documents with {num_elements} elements of queries or"
            " keys per device (supported: fewer than 2^31, since offsets are int32); use more context or tensor"
            " ranks, memory.tile_tokens, or kernel pallas"
        )


def _settings(q_BTNH: jax.Array, spec: AttentionSpec) -> dict[str, Any]:
    return dict(scale=spec.scale_for(q_BTNH.shape[-1]), causal=spec.causal)


def prepared_table(
    ranges: KeyRanges, num_keys: int, spec: AttentionSpec, min_tokens: int | None
) -> DocumentTable:
    """The table of calls with these ranges; `min_tokens` of `buckets`."""
    calls = calls_for(
        *ranges.start_BT.shape,
        num_keys,
        causal=spec.causal,
        few_documents=spec.few_documents,
        min_tokens=min_tokens,
    )
    has_window = spec.window is not None
    return document_table(*ranges, num_keys, calls, causal=spec.causal, has_window=has_window)


class Block(NamedTuple):
    """The packed calls for one block of queries and one of keys."""

    table: DocumentTable
    calls: Calls
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]

    @classmethod
    def create(
        cls, q_BTNH, k_BSKH, table, spec: AttentionSpec, min_tokens: int | None = None
    ) -> "Block":
        """`table` of `forward`, `min_tokens` of `buckets`."""
        num_keys = k_BSKH.shape[1]
        calls = calls_for(
            *q_BTNH.shape[:2],
            num_keys,
            causal=spec.causal,
            few_documents=spec.few_documents,
            min_tokens=min_tokens,
        )
        if len(table) > 1:
            table = (prepared_table(KeyRanges(*table), num_keys, spec, min_tokens),)
        return cls(*table, calls, q_BTNH.shape, k_BSKH.shape)

    def forward(self, call: Callable, unpack: Callable) -> CallResults:
        """(out_BTNH, lse_BNT) of the calls; arguments of `run`."""
        documents = self.q_document_BT[:, :, None, None], self.q_document_BT[:, None]
        calls = self.run(call, unpack, documents, unwritten=(0.0, -jnp.inf))

        def joined(results):
            out_BTNH, lse_BNT = calls.joined(results)
            return out_BTNH, self.checked(lse_BNT)

        return CallResults(calls.results, joined)

    def backward(self, call: Callable) -> CallResults:
        """(dq, dk, dv) of the calls."""
        documents = (
            x[:, :, None, None]
            for x in (self.q_document_BT, self.kv_document_BS, self.kv_document_BS)
        )
        return self.run(
            call, lambda results, *_: results, tuple(documents), unwritten=(0.0, 0.0, 0.0)
        )

    @property
    def q_document_BT(self) -> jax.Array:
        return self.table.q_document.reshape(self.q_shape[:2])

    @property
    def kv_document_BS(self) -> jax.Array:
        return self.table.kv_document.reshape(self.k_shape[:2])

    def run(
        self,
        call: Callable,
        unpack: Callable,
        documents: tuple[jax.Array, ...],
        unwritten: tuple[float, ...],
    ) -> CallResults:
        """The calls for all documents; joined, each result has the rows of all of them.

        Args:
          call: `(bucket, DocumentRows)` -> the results of a call.
          unpack: `(results, first document)` -> the results with one row per token.
          documents: for each result, the document of its rows, broadcast to its shape.
          unwritten: for each result, the value in rows that belong to no document.
        """
        calls = self.calls.begins
        results = []
        for (bucket, first), rows in zip(calls, self.table.once, strict=True):
            with jax.named_scope(scopes.MORE_DOCUMENTS) if first else nullcontext():
                results.append(call(bucket, rows))
        num_packed = len(results)
        if self.calls.repeated:  # the loop writes to the results of the last call
            num_packed -= 1
            results[-1] = self._repeat(call, unpack, documents, unpack(results[-1], calls[-1][1]))

        def joined(results):
            results = [unpack(x, first) for x, (_, first) in zip(results, calls[:num_packed])] + [
                *results[num_packed:]
            ]
            rows = results[0]
            for (_, first), later in zip(calls[1:], results[1:], strict=True):
                rows = [
                    jnp.where(document < first, *pair)
                    for document, *pair in zip(documents, rows, later)
                ]
            return tuple(
                jnp.where(document < 0, _full(document, value, x.dtype), x)
                for document, value, x in zip(documents, unwritten, rows, strict=True)
            )

        return CallResults(results, joined)

    def _repeat(
        self,
        call: Callable,
        unpack: Callable,
        documents: tuple[jax.Array, ...],
        rows: tuple[jax.Array, ...],
    ):
        """`rows` with the rows of the documents after the calls outside of the loop."""
        sizes = self.calls.sizes
        repeated = self.calls.repeated

        def call_bucket(bucket: Bucket, first):
            rows = self.table.repeated.rows_at(
                bucket, first, [math.prod(x[:2]) for x in (self.q_shape, self.k_shape)]
            )
            return bucket.num_documents, unpack(call(bucket, rows), first)

        def next_call(state):
            first, rows = state
            branches = [functools.partial(call_bucket, bucket) for bucket in repeated]
            index = jnp.maximum(self.table.bucket_of(first) - (len(sizes) - len(repeated)), 0)
            num_documents, new_rows = lax.switch(index, branches, first)
            joined = (
                jnp.where((first <= document) & (document < first + num_documents), new, old)
                for document, new, old in zip(documents, new_rows, rows, strict=True)
            )
            return first + num_documents, tuple(joined)

        with jax.named_scope(scopes.MORE_DOCUMENTS):
            state = jnp.int32(self.calls.num_documents), rows
            return lax.while_loop(
                lambda state: state[0] < self.table.num_documents, next_call, state
            )[1]

    def checked(self, lse_BNT: jax.Array) -> jax.Array:
        """NaN if there are more documents than calls without a loop take, or too many long ones."""
        if self.calls.repeated:
            return lse_BNT
        longest = self.calls.once[0].num_documents
        fits = (self.table.num_documents <= self.calls.num_documents) & (
            self.table.bucket_ends[0] <= longest
        )
        return jnp.where(fits, lse_BNT, jnp.nan)

    def operands(self, documents: DocumentRows) -> PackedOperands:
        return packed_operands(documents, self.q_shape, self.k_shape)

    def rows(self, bucket: Bucket, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The arrays with the rows of the bucket's calls; moves no data."""
        return tuple(x.reshape(bucket.num_rows, -1, *x.shape[2:]) for x in arrays)

    def unpack_lse(self, lse_DNT: jax.Array, first) -> jax.Array:
        """[documents, N, tokens] to [B, N, T]; undefined for rows of other documents."""
        document_BT1, row_BT1 = (
            x.reshape(*self.q_shape[:2], 1) for x in (self.table.q_document, self.table.q_row)
        )
        _, num_heads, num_tokens = lse_DNT.shape
        index_BTN = (
            (document_BT1 - first) * num_heads + jnp.arange(num_heads)
        ) * num_tokens + row_BT1
        # XLA would transpose an array before a gather
        lse_BTN = jnp.take(lse_DNT.reshape(-1), index_BTN, mode="clip")
        return lse_BTN.swapaxes(1, 2)

    def pack_lse(self, lse_BNT: jax.Array, bucket: Bucket, documents: DocumentRows) -> jax.Array:
        """The inverse: [documents, N, tokens]; 0 for rows that belong to no document."""
        start_D = documents.q_start.reshape(-1)[: bucket.num_documents, None, None]
        length_D = documents.q_length.reshape(-1, 1, 1)
        _, num_heads, num_tokens = lse_BNT.shape
        row_in_document = jnp.arange(bucket.num_queries)
        sequence_D1T, row_D1T = jnp.divmod(start_D + row_in_document, num_tokens)
        index_DNT = (
            sequence_D1T * num_heads + jnp.arange(num_heads)[:, None]
        ) * num_tokens + row_D1T
        lse_DNT = jnp.take(lse_BNT.reshape(-1), index_DNT, mode="clip")
        return jnp.where(row_in_document < length_D, lse_DNT, 0.0)


def _full(document: jax.Array, value: float, dtype) -> jax.Array:
    """`value` in the shape of `document`, on which it depends: JAX computes a constant before a
    loop, as an array.
    """
    return (0 * document).astype(dtype) + jnp.asarray(value, dtype)
