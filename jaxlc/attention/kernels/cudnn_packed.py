"""cuDNN's attention for packed documents: a few calls per kernel call, whose operands are in `packed_operands`.

The first calls take the longest documents, a loop the others, if there are any: the host waits for the condition of
each round. Ring steps with few documents (`AttentionSpec.few_documents`) have no loop. A sequence of one document is
one call of the same FLOPs as one with an implicit mask.

cuDNN writes the rows of the documents of a call only. `CallResults.joined` selects the call that has a row. Rows
without any, of fully masked queries and of keys that no query attends to, are 0 in out and gradients, -inf in the lse.
"""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc._jax_internals import cudnn_packed_backward, cudnn_packed_forward
from jaxlc.attention.contract import CallResults
from jaxlc.attention.kernels.packed_operands import (
    MAX_ELEMENTS,
    Bucket,
    Calls,
    DocumentRows,
    DocumentTable,
    PackedOperands,
    calls_for,
    document_table,
    packed_operands,
)
from jaxlc.core import scopes
from jaxlc.core.errors import Unsupported


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *table,
    scale: float,
    causal: bool,
    few_documents: bool = False,
) -> CallResults:
    """(out_BTNH in q's dtype, lse_BNT float32).

    Args:
      table: of `document_table`, or the key ranges start_BT and end_BT that it is computed from.
      few_documents: of the spec. The lse of ring steps is NaN if there are more.
    Raises:
      Unsupported: q or k has 2^31 elements or more.
    """
    block = _Block.create(q_BTNH, k_BSKH, table, causal=causal, few_documents=few_documents)

    def call(bucket: Bucket, documents: DocumentRows):
        q, k, v = block.rows(bucket, q_BTNH, k_BSKH, v_BSKH)
        out, lse_DNT = cudnn_packed_forward(q, k, v, *block.operands(documents), scale=scale, causal=causal)
        return out.reshape(q_BTNH.shape), lse_DNT

    def unpack(results, bucket: Bucket, first):
        out_BTNH, lse_DNT = results
        return out_BTNH, block.unpack_lse(lse_DNT, bucket, first)

    documents = block.q_document_BT[:, :, None, None], block.q_document_BT[:, None]
    calls = block.run(call, unpack, documents, unwritten=(0.0, -jnp.inf))

    def joined(results):
        out_BTNH, lse_BNT = calls.joined(results)
        return out_BTNH, block.checked(lse_BNT)

    return CallResults(calls.results, joined)


def backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    dout_BTNH: jax.Array,
    *table,
    scale: float,
    causal: bool,
    few_documents: bool = False,
) -> CallResults:
    """(dq, dk, dv) in q's dtype, without the gradient of the lse; out and dout in q's dtype. Otherwise as `forward`."""
    block = _Block.create(q_BTNH, k_BSKH, table, causal=causal, few_documents=few_documents)

    def call(bucket: Bucket, documents: DocumentRows):
        q, k, v, out, dout = block.rows(bucket, q_BTNH, k_BSKH, v_BSKH, out_BTNH, dout_BTNH)
        operands, lse = block.operands(documents), block.pack_lse(lse_BNT, bucket, documents)
        results = cudnn_packed_backward(q, k, v, *operands, out, lse, dout, scale=scale, causal=causal)
        return tuple(dx.reshape(x.shape) for dx, x in zip(results, (q_BTNH, k_BSKH, v_BSKH), strict=True))

    documents = (x[:, :, None, None] for x in (block.q_document_BT, block.kv_document_BS, block.kv_document_BS))
    return block.run(call, lambda results, *_: results, tuple(documents), unwritten=(0.0, 0.0, 0.0))


class _Block(NamedTuple):
    """The packed calls for one block of queries and one of keys."""

    table: DocumentTable
    calls: Calls
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]

    @classmethod
    def create(cls, q_BTNH, k_BSKH, table, *, causal: bool, few_documents: bool) -> "_Block":
        num_elements = max(q_BTNH.size, k_BSKH.size)
        if num_elements >= MAX_ELEMENTS:
            raise Unsupported(
                f"unsupported by attention kernel cudnn: packed documents with {num_elements} elements of queries or"
                " keys per device (supported: fewer than 2^31, since offsets are int32); use more context or tensor"
                " ranks, memory.tile_tokens, or kernel pallas"
            )
        (batch, num_queries), num_keys = q_BTNH.shape[:2], k_BSKH.shape[1]
        calls = calls_for(batch, num_queries, num_keys, causal=causal, few_documents=few_documents)
        if len(table) > 1:
            table = (document_table(*table, num_keys, calls, causal=causal),)
        return cls(*table, calls, q_BTNH.shape, k_BSKH.shape)

    @property
    def q_document_BT(self) -> jax.Array:
        return self.table.q_document.reshape(self.q_shape[:2])

    @property
    def kv_document_BS(self) -> jax.Array:
        return self.table.kv_document.reshape(self.k_shape[:2])

    def run(
        self, call: Callable, unpack: Callable, documents: tuple[jax.Array, ...], unwritten: tuple[float, ...]
    ) -> CallResults:
        """The calls for all documents; joined, each result has the rows of all of them.

        Args:
          call: `(bucket, DocumentRows)` -> the results of a call.
          unpack: `(results, bucket, first document)` -> the results with one row per token.
          documents: for each result, the document of its rows, broadcast to its shape.
          unwritten: for each result, the value in rows that belong to no document.
        """
        calls, results = self.calls.begins, []
        for (bucket, first), rows in zip(calls, self.table.once, strict=True):
            with jax.named_scope(scopes.MORE_DOCUMENTS) if first else nullcontext():
                results.append(call(bucket, rows))
        num_packed = len(results)
        if self.calls.repeated:  # the loop writes to the results of the last call
            num_packed -= 1
            results[-1] = self._repeat(call, unpack, documents, unpack(results[-1], *calls[-1]))

        def joined(results):
            results = [unpack(x, *at) for x, at in zip(results, calls[:num_packed])] + [*results[num_packed:]]
            rows = results[0]
            for (_, first), later in zip(calls[1:], results[1:], strict=True):
                rows = [jnp.where(document < first, *pair) for document, *pair in zip(documents, rows, later)]
            return tuple(
                jnp.where(document < 0, _full(document, value, x.dtype), x)
                for document, value, x in zip(documents, unwritten, rows, strict=True)
            )

        return CallResults(results, joined)

    def _repeat(self, call: Callable, unpack: Callable, documents: tuple[jax.Array, ...], rows: tuple[jax.Array, ...]):
        """`rows` with those of the documents after the calls outside of the loop."""
        sizes, repeated = self.calls.sizes, self.calls.repeated

        def call_bucket(bucket: Bucket, first):
            rows = self.table.repeated.of_call(bucket, first, [math.prod(x[:2]) for x in (self.q_shape, self.k_shape)])
            return bucket.num_documents, unpack(call(bucket, rows), bucket, first)

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
            return lax.while_loop(lambda state: state[0] < self.table.num_documents, next_call, state)[1]

    def checked(self, lse_BNT: jax.Array) -> jax.Array:
        """NaN if there are more documents than calls without a loop take, or too many long ones."""
        if self.calls.repeated:
            return lse_BNT
        longest = self.calls.once[0].num_documents
        fits = (self.table.num_documents <= self.calls.num_documents) & (self.table.bucket_ends[0] <= longest)
        return jnp.where(fits, lse_BNT, jnp.nan)

    def operands(self, documents: DocumentRows) -> PackedOperands:
        return packed_operands(documents, self.q_shape, self.k_shape)

    def rows(self, bucket: Bucket, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The arrays with the rows of the bucket's calls; moves no data."""
        return tuple(x.reshape(bucket.num_rows, -1, *x.shape[2:]) for x in arrays)

    def unpack_lse(self, lse_DNT: jax.Array, bucket: Bucket, first) -> jax.Array:
        """[documents, N, tokens] to [B, N, T]; undefined for rows of other documents."""
        document_BT1, row_BT1 = (x.reshape(*self.q_shape[:2], 1) for x in (self.table.q_document, self.table.q_row))
        _, num_heads, num_tokens = lse_DNT.shape
        index_BTN = ((document_BT1 - first) * num_heads + jnp.arange(num_heads)) * num_tokens + row_BT1
        lse_BTN = jnp.take(lse_DNT.reshape(-1), index_BTN, mode="clip")  # XLA would transpose an array before a gather
        return lse_BTN.swapaxes(1, 2)

    def pack_lse(self, lse_BNT: jax.Array, bucket: Bucket, documents: DocumentRows) -> jax.Array:
        """The inverse: [documents, N, tokens]; 0 for rows that belong to no document."""
        start_D = documents.q_start.reshape(-1)[: bucket.num_documents, None, None]
        length_D = documents.q_length.reshape(-1, 1, 1)
        _, num_heads, num_tokens = lse_BNT.shape
        row_in_document = jnp.arange(bucket.num_queries)
        sequence_D1T, row_D1T = jnp.divmod(start_D + row_in_document, num_tokens)
        index_DNT = (sequence_D1T * num_heads + jnp.arange(num_heads)[:, None]) * num_tokens + row_D1T
        lse_DNT = jnp.take(lse_BNT.reshape(-1), index_DNT, mode="clip")
        return jnp.where(row_in_document < length_D, lse_DNT, 0.0)


def _full(document: jax.Array, value: float, dtype) -> jax.Array:
    """`value` in the shape of `document`, on which it depends: JAX computes a constant before a loop, as an array."""
    return (0 * document).astype(dtype) + jnp.asarray(value, dtype)
