"""Lengths and offsets of cuDNN's packed calls, computed from key ranges.

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
of a ring step, and those of a typical own block (`calls_for`).
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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


def buckets(batch: int, num_queries: int, num_keys: int) -> tuple[Bucket, ...]:
    """The sizes of calls for arrays [batch, num_queries, ...] and [batch, num_keys, ...], longest documents first."""
    sizes, factor = [], 1
    while factor == 1 or (
        num_queries % factor == num_keys % factor == 0 and min(num_queries, num_keys) >= factor * MIN_BUCKET_TOKENS
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
        return list(zip(self.once, itertools.accumulate((size.num_documents for size in self.once), initial=0)))

    @property
    def num_documents(self) -> int:
        """The number of documents of the calls outside of the loop."""
        return sum(size.num_documents for size in self.once)


def calls_for(batch: int, num_queries: int, num_keys: int, *, causal: bool, few_documents: bool) -> Calls:
    """The calls for a spec and arrays [batch, num_queries, ...] and [batch, num_keys, ...].

    With few documents, two calls take all documents of a ring step, and those of a typical own block. At most three
    documents of a sequence have more than a quarter of the tokens, and 15 more than a sixteenth.
    """
    sizes = buckets(batch, num_queries, num_keys)
    if not few_documents or num_queries % 4 or num_keys % 4:
        return Calls(sizes[:1], sizes)
    quarter = Bucket(4 * batch, num_queries // 4, num_keys // 4, 3 if causal else 2)
    return Calls((Bucket(batch, num_queries, num_keys, 3), quarter), (sizes[2:] or (quarter,)) if causal else ())


class DocumentRows(NamedTuple):
    """The rows of R x M documents of a call; int32. Rows are those of the arrays [batch x tokens, ...].

    Unused documents have length 0 and start at the end.
    """

    q_length: jax.Array  # [R, M]
    kv_length: jax.Array
    q_start: jax.Array  # [R, M + 1]; the first R x M + 1 in row-major order count, and the last one is the end
    kv_start: jax.Array

    def of_call(self, bucket: Bucket, first, ends) -> "DocumentRows":
        """The documents of a call, from `first` on.

        Args:
          ends: the number of rows of q, and of k.
        """
        rows = [lax.dynamic_slice_in_dim(x, first, bucket.num_documents) for x in self]
        rows[2:] = (jnp.pad(x, (0, bucket.num_rows), constant_values=end) for x, end in zip(rows[2:], ends))
        return DocumentRows(*(x.reshape(bucket.num_rows, -1) for x in rows))


class DocumentTable(NamedTuple):
    """The documents of a block of queries and one of keys, sorted by bucket; int32."""

    once: tuple[DocumentRows, ...]  # by call outside of the loop
    # [documents], [documents], ...: all documents, and as many unused ones as a call of the loop can take.
    repeated: DocumentRows | None
    bucket_ends: jax.Array  # [buckets]: number of documents in this bucket and those before it
    q_document: jax.Array  # [batch x num_queries]: the document that a row belongs to; -1 for fully masked rows
    q_row: jax.Array  # [batch x num_queries]: the index of the row in its document
    kv_document: jax.Array  # [batch x num_keys]

    @property
    def num_documents(self) -> jax.Array:
        return self.bucket_ends[-1]

    def bucket_of(self, document: jax.Array) -> jax.Array:
        """The index of the bucket of a document."""
        return (document >= self.bucket_ends[:-1]).sum()


def document_table(
    start_BT: jax.Array, end_BT: jax.Array, num_keys: int, calls: Calls, *, causal: bool
) -> DocumentTable:
    """The documents of the key ranges [start, end) of each query; start == end for fully masked rows.

    Args:
      calls: of `calls_for`.
      causal: a query at index t has the range [first, t + 1), where first is the index of its document's first query.
        Otherwise all queries of a document have the same range. It is not checked.
    """
    (batch, num_queries), sizes = start_BT.shape, calls.sizes
    has_keys_BT = start_BT < end_BT
    is_first_BT = has_keys_BT & (
        start_BT == jnp.arange(num_queries) if causal else _differs_from_previous(start_BT, end_BT)
    )
    ends_here_BT = jnp.pad((is_first_BT | ~has_keys_BT)[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    is_last_BT = has_keys_BT & ends_here_BT

    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    q_row_BT = rows * num_queries + jnp.arange(num_queries, dtype=jnp.int32)
    document_BT = jnp.cumsum(is_first_BT.reshape(-1), dtype=jnp.int32).reshape(start_BT.shape) - 1
    start_D2 = _compact(is_first_BT, document_BT, (q_row_BT, rows * num_keys + start_BT))
    end_D2 = _compact(is_last_BT, document_BT, (q_row_BT + 1, rows * num_keys + end_BT))
    length_D2 = end_D2 - start_D2
    num_documents = is_first_BT.sum(dtype=jnp.int32)

    # The index of each document's bucket; len(sizes) for unused entries, so that these come last.
    limits = jnp.array([(size.num_queries, size.num_keys) for size in sizes[1:]], jnp.int32).reshape(-1, 2)
    bucket_D = (length_D2[:, None] <= limits).all(-1).sum(1)
    bucket_D = jnp.where(jnp.arange(len(bucket_D)) < num_documents, bucket_D, len(sizes))
    sorted_D, bucket_ends = _counting_sort(bucket_D, len(sizes) + 1)
    capacity = max(calls.num_documents, *(size.num_documents for size in calls.repeated), 0)
    ends = jnp.array((batch * num_queries, batch * num_keys), jnp.int32)
    length_D2 = jnp.zeros((len(sorted_D) + capacity, 2), jnp.int32).at[sorted_D].set(length_D2)
    start_D2 = jnp.broadcast_to(ends, length_D2.shape).at[sorted_D].set(start_D2)
    start_D2 = jnp.where(length_D2 > 0, start_D2, ends)
    all_documents = DocumentRows(*length_D2.T, *start_D2.T)
    q_document = _document_of_rows(all_documents.q_start, all_documents.q_length, batch * num_queries)
    return DocumentTable(
        tuple(all_documents.of_call(*at, ends) for at in calls.begins),
        all_documents if calls.repeated else None,
        bucket_ends[:-1],
        q_document,
        jnp.where(q_document >= 0, jnp.arange(len(q_document)) - all_documents.q_start[q_document], 0),
        _document_of_rows(all_documents.kv_start, all_documents.kv_length, batch * num_keys),
    )


class PackedOperands(NamedTuple):
    """Operands of `cudnn_packed_forward`: int32, R rows of M documents."""

    q_lengths_RM: jax.Array
    kv_lengths_RM: jax.Array
    q_offsets: jax.Array  # [R, M + 1], in elements; the first R x M + 1 in row-major order count
    kv_offsets: jax.Array


def packed_operands(rows: DocumentRows, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> PackedOperands:
    """The operands of the call for these documents.

    Args:
      q_shape, k_shape: [B, T, N, H] and [B, S, K, H]; v has the shape of k, and out, dout and dq that of q.
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


def _compact(is_selected_BT: jax.Array, document_BT: jax.Array, values_BT: tuple[jax.Array, jax.Array]) -> jax.Array:
    """[documents, 2]: for each document, the two values of the one query that is selected; 0 for unused entries."""
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


def _document_of_rows(start_D: jax.Array, length_D: jax.Array, num_rows: int) -> jax.Array:
    """[num_rows]: the document that a row belongs to, or -1. Documents do not overlap."""
    number_D = jnp.where(length_D > 0, jnp.arange(1, len(start_D) + 1, dtype=jnp.int32), 0)
    change = jnp.zeros(num_rows + 1, jnp.int32).at[start_D].add(number_D).at[start_D + length_D].add(-number_D)
    return jnp.cumsum(change, dtype=jnp.int32)[:-1] - 1
