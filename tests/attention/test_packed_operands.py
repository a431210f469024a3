"""Documents, lengths and offsets of cuDNN's packed calls, as numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.attention.contract import AttentionSpec
from jaxlc.attention.kernels.cudnn_packed import (
    DOCUMENTS_PER_ROW,
    Bucket,
    Calls,
    buckets,
    calls_for,
    document_table,
    packed_operands,
)
from jaxlc.attention.key_ranges import TokenInfo, key_ranges


def _table(segments, sizes, causal=True, k_segments=None):
    """The table of tokens with these segment ids, [batch, tokens], for one call of the first of
    `sizes` and a loop.

    Positions follow from the order.
    """
    queries = TokenInfo(
        jnp.broadcast_to(jnp.arange(len(segments[0])), (len(segments), len(segments[0]))), segments
    )
    keys = queries if k_segments is None else TokenInfo(None, jnp.asarray(k_segments))
    ranges = key_ranges(
        queries._replace(segments_BT=jnp.asarray(segments)), keys, AttentionSpec(causal=causal)
    )
    return document_table(
        *ranges, keys.segments_BT.shape[1], Calls(sizes[:1], sizes), causal=causal
    )


def _documents(table) -> list[tuple[int, ...]]:
    """(first row of q, queries, first row of k, keys) of each document."""
    q_length, kv_length, q_start, kv_start = map(np.asarray, table.repeated)
    rows = np.stack((q_start, q_length, kv_start, kv_length), axis=1)
    num_documents = int(table.num_documents)
    ends = len(table.q_document), 0, len(table.kv_document), 0
    assert (rows[num_documents:] == ends).all()
    return [tuple(row) for row in rows[:num_documents].tolist()]


def test_document_table_of_own_block_has_triangles():
    """Two sequences of 8 tokens: documents of 3 and 4 tokens and padding; padding, then documents
    of 1 and 5.
    """
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [0, 0, 7, 3, 3, 3, 3, 3]])
    table = _table(segments, (Bucket(2, 8, 8),))
    assert _documents(table) == [(0, 3, 0, 3), (3, 4, 3, 4), (10, 1, 10, 1), (11, 5, 11, 5)]
    assert table.q_document.tolist() == [0, 0, 0, 1, 1, 1, 1, -1, -1, -1, 2, 3, 3, 3, 3, 3]
    assert table.kv_document.tolist() == table.q_document.tolist()
    assert table.q_row.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 0, 0, 0, 0, 1, 2, 3, 4]


def test_document_table_of_ring_step_has_rectangles():
    """Queries and keys of a document are at different rows; documents on one side only have none."""
    segments, k_segments = (
        np.array([[4, 1, 1, 1, 2, 2, 3, 0]]),
        np.array([[2, 2, 2, 5, 1, 3, 3, 0]]),
    )
    table = _table(segments, (Bucket(1, 8, 8),), causal=False, k_segments=k_segments)
    assert _documents(table) == [(1, 3, 4, 1), (4, 2, 0, 3), (6, 1, 5, 2)]
    assert table.q_document.tolist() == [-1, 0, 0, 0, 1, 1, 2, -1]
    assert table.kv_document.tolist() == [1, 1, 1, -1, 0, 2, 2, -1]


def test_document_table_without_pairs_is_empty():
    table = _table(
        np.array([[1, 1, 0, 0]]),
        (Bucket(1, 4, 4),),
        causal=False,
        k_segments=np.array([[2, 2, 2, 0]]),
    )
    assert table.num_documents == 0 and _documents(table) == []
    assert set(table.q_document.tolist()) == set(table.kv_document.tolist()) == {-1}


def test_document_table_is_sorted_by_bucket():
    """A bucket holds a document if both its queries and its keys fit."""
    sizes = (Bucket(1, 16, 16), Bucket(4, 4, 4), Bucket(16, 1, 1))
    segments = np.repeat([[1, 2, 3, 4, 5]], [1, 4, 5, 1, 5], axis=1)
    table = _table(segments, sizes)
    assert [queries for _, queries, _, _ in _documents(table)] == [5, 5, 4, 1, 1]
    assert table.bucket_ends.tolist() == [2, 3, 5]
    assert [int(table.bucket_of(document)) for document in range(5)] == [0, 0, 1, 2, 2]
    k_segments = np.repeat([[1, 2, 3, 4, 5]], [5, 3, 3, 2, 3], axis=1)
    table = _table(segments, sizes, causal=False, k_segments=k_segments)
    assert [queries for _, queries, _, _ in _documents(table)] == [1, 5, 5, 4, 1]


def test_packed_operands_offsets_are_elements_of_their_array():
    """Grouped queries, N = 4 and K = 2 of head dim 8: 32 elements per token of q, 16 of k. Unused:
    the end.
    """
    table = _table(np.array([[1, 1, 1, 2, 2, 2, 2, 0]]), (Bucket(1, 8, 8),))
    operands = packed_operands(table.once[0], (1, 8, 4, 8), (1, 8, 2, 8))
    assert [x.tolist() for x in operands] == [[[3, 4]], [[3, 4]], [[0, 96, 256]], [[0, 48, 128]]]
    assert {x.dtype.name for x in operands} == {"int32"}


def test_packed_operands_of_later_rows_count_earlier_ones():
    segments = np.array([[1, 1, 0, 0], [3, 0, 2, 2]])
    table = _table(segments, buckets(2, 4, 4))
    operands = packed_operands(
        table.repeated.rows_at(Bucket(2, 4, 4), 1, (8, 8)), (2, 4, 3, 8), (2, 4, 1, 8)
    )
    # Four documents per call, as rows of two; cuDNN reads offsets across rows. Documents 1 and 2 of
    # the table are left.
    assert operands.q_lengths_RM.tolist() == operands.kv_lengths_RM.tolist() == [[1, 2], [0, 0]]
    assert operands.q_offsets.tolist() == [[96, 144, 192], [192, 192, 192]]
    assert operands.kv_offsets.tolist() == [[32, 48, 64], [64, 64, 64]]


@pytest.mark.parametrize(
    "shape", [(1, 65536, 65536), (2, 8192, 4096), (1, 1000, 1000), (3, 96, 96), (1, 7, 5)]
)
def test_buckets_have_equal_padded_sizes(shape):
    """Rows x tokens do not depend on the bucket, so neither do the padded lse and the workspace."""
    batch, num_queries, num_keys = shape
    sizes = buckets(*shape)
    assert sizes[0][:3] == shape
    for size in sizes:
        assert (size.num_rows * size.num_queries, size.num_rows * size.num_keys) == (
            batch * num_queries,
            batch * num_keys,
        )
        assert size.num_documents == DOCUMENTS_PER_ROW * size.num_rows
    assert len(sizes) == {65536: 5, 8192: 3, 1000: 2}.get(num_queries, 1)


def test_calls_of_few_documents_take_the_longest_first():
    """At most 3 documents of a rank have more than a quarter of its tokens, and 15 more than a
    sixteenth.
    """
    ring_step, own_block = (
        calls_for(2, 8192, 8192, causal=causal, few_documents=True) for causal in (False, True)
    )
    assert ring_step == Calls((Bucket(2, 8192, 8192, 3), Bucket(8, 2048, 2048, 2)), ())
    assert own_block == Calls(
        (Bucket(2, 8192, 8192, 3), Bucket(8, 2048, 2048, 3)),
        tuple(Bucket(32 * n, 512 // n, 512 // n) for n in (1, 4)),
    )
    assert [calls.num_documents for calls in (ring_step, own_block)] == [2 * 11, 2 * 15]
    assert [size.num_queries for size in own_block.sizes] == [8192, 2048, 512, 128]
    assert calls_for(1, 256, 256, causal=True, few_documents=True).repeated == (
        Bucket(4, 64, 64, 3),
    )
    for causal in (False, True):  # without quarters, and for many documents
        assert calls_for(1, 7, 7, causal=causal, few_documents=True) == Calls(
            buckets(1, 7, 7), buckets(1, 7, 7)
        )
