"""cuDNN's attention for packed documents: a few calls per kernel call, whose operands are in `packed_operands`.

The first call takes the longest documents, a loop the others, if there are any: the host waits for the condition of
each round. In ring steps with few documents (`AttentionSpec.few_documents`) a second call takes the others, without a
loop. A sequence of one document is one call of the same FLOPs as one with an implicit mask. cuDNN does not write the
rows of fully masked queries, nor those of keys that no query attends to: they are replaced here, out and gradients by
0, the lse by -inf.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc._jax_internals import cudnn_packed_backward, cudnn_packed_forward
from jaxlc.attention.contract import KeyRanges
from jaxlc.attention.kernels.packed_operands import (
    MAX_ELEMENTS,
    Bucket,
    DocumentTable,
    PackedOperands,
    buckets_of_calls,
    document_table,
    packed_operands,
)
from jaxlc.core import scopes
from jaxlc.core.errors import Unsupported


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *table: jax.Array,
    scale: float,
    causal: bool,
    few_documents: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(out_BTNH in q's dtype, lse_BNT float32).

    Args:
      table: the arrays of `document_table`, or the key ranges (start_BT, end_BT) that it is computed from.
      few_documents: of the spec. The lse is NaN if there are more.
    Raises:
      Unsupported: q or k has 2^31 elements or more.
    """
    calls = _Calls.create(q_BTNH, k_BSKH, table, causal=causal, few_documents=few_documents)

    def call(bucket: Bucket, first):
        q, k, v = calls.rows(bucket, q_BTNH, k_BSKH, v_BSKH)
        out, lse = cudnn_packed_forward(q, k, v, *calls.operands(bucket, first), scale=scale, causal=causal)
        return out.reshape(q_BTNH.shape), calls.unpack_lse(lse, bucket, first)

    out_BTNH, lse_BTN = calls.run(call, (calls.q_document_BT, calls.q_document_BT))
    out_BTNH = _replace_unwritten(out_BTNH, calls.q_document_BT)
    lse_BTN = calls.checked(lse_BTN)
    return out_BTNH, _replace_unwritten(lse_BTN, calls.q_document_BT, -jnp.inf).swapaxes(1, 2)


def backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    dout_BTNH: jax.Array,
    *table: jax.Array,
    scale: float,
    causal: bool,
    few_documents: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv) in q's dtype, without the gradient of the lse; out and dout in q's dtype. Otherwise as `forward`."""
    calls = _Calls.create(q_BTNH, k_BSKH, table, causal=causal, few_documents=few_documents)

    def call(bucket: Bucket, first):
        q, k, v, out, dout = calls.rows(bucket, q_BTNH, k_BSKH, v_BSKH, out_BTNH, dout_BTNH)
        operands, lse = calls.operands(bucket, first), calls.pack_lse(lse_BNT, bucket, first)
        results = cudnn_packed_backward(q, k, v, *operands, out, lse, dout, scale=scale, causal=causal)
        return tuple(dx.reshape(x.shape) for dx, x in zip(results, (q_BTNH, k_BSKH, v_BSKH), strict=True))

    documents = calls.q_document_BT, calls.kv_document_BS, calls.kv_document_BS
    return tuple(map(_replace_unwritten, calls.run(call, documents), documents))


class _Calls(NamedTuple):
    """The packed calls for one block of queries and one of keys."""

    table: DocumentTable
    sizes: tuple[Bucket, ...]
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    has_loop: bool  # otherwise there is one call of each size

    @classmethod
    def create(cls, q_BTNH, k_BSKH, table: tuple[jax.Array, ...], *, causal: bool, few_documents: bool) -> "_Calls":
        num_elements = max(q_BTNH.size, k_BSKH.size)
        if num_elements >= MAX_ELEMENTS:
            raise Unsupported(
                f"unsupported by attention kernel cudnn: packed documents with {num_elements} elements of queries or"
                " keys per device (supported: fewer than 2^31, since offsets are int32); use more context or tensor"
                " ranks, memory.tile_tokens, or kernel pallas"
            )
        (batch, num_queries), num_keys = q_BTNH.shape[:2], k_BSKH.shape[1]
        sizes, has_loop = buckets_of_calls(batch, num_queries, num_keys, causal=causal, few_documents=few_documents)
        if len(table) == len(KeyRanges._fields):
            table = document_table(*table, num_keys, sizes, causal=causal)
        return cls(DocumentTable(*table), sizes, q_BTNH.shape, k_BSKH.shape, has_loop)

    @property
    def q_document_BT(self) -> jax.Array:
        return self.table.q_document.reshape(self.q_shape[:2])

    @property
    def kv_document_BS(self) -> jax.Array:
        return self.table.kv_document.reshape(self.k_shape[:2])

    def run(self, call: Callable, documents: tuple[jax.Array, ...]):
        """The joined results of `call(bucket, first)` for all documents.

        Args:
          documents: for each result, the document of its rows: [B, T] or [B, S].
        """
        table, sizes = self.table, self.sizes
        if not self.has_loop:
            return self._one_call_of_each_size(call, documents)

        def call_and_size(bucket: Bucket, first):
            return bucket.num_documents, call(bucket, first)

        def next_call(state):
            first, results = state
            branches = [functools.partial(call_and_size, bucket) for bucket in sizes]
            num_documents, new_results = lax.switch(table.bucket_of(first), branches, first)
            joined = []
            for document, new, old in zip(documents, new_results, results, strict=True):
                is_new = (first <= document) & (document < first + num_documents)
                joined.append(jnp.where(_broadcast(is_new, new), new, old))
            return first + num_documents, tuple(joined)

        state = jnp.int32(sizes[0].num_documents), call(sizes[0], 0)
        with jax.named_scope(scopes.MORE_DOCUMENTS):
            return lax.while_loop(lambda state: state[0] < table.num_documents, next_call, state)[1]

    def _one_call_of_each_size(self, call: Callable, documents: tuple[jax.Array, ...]):
        first, joined = self.sizes[0].num_documents, call(self.sizes[0], 0)
        for bucket in self.sizes[1:]:
            with jax.named_scope(scopes.MORE_DOCUMENTS):
                results = call(bucket, first)
            joined = tuple(
                jnp.where(_broadcast(document < first, old), old, new)
                for document, new, old in zip(documents, results, joined, strict=True)
            )
            first += bucket.num_documents
        return joined

    def checked(self, lse_BTN: jax.Array) -> jax.Array:
        """NaN if there are more documents than calls without a loop take."""
        if self.has_loop:
            return lse_BTN
        max_documents = sum(size.num_documents for size in self.sizes)
        return jnp.where(self.table.num_documents > max_documents, jnp.nan, lse_BTN)

    def operands(self, bucket: Bucket, first) -> PackedOperands:
        return packed_operands(self.table, first, bucket, self.q_shape, self.k_shape)

    def rows(self, bucket: Bucket, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The arrays with the rows of the bucket's calls; moves no data."""
        return tuple(x.reshape(bucket.num_rows, -1, *x.shape[2:]) for x in arrays)

    def unpack_lse(self, lse_DNT: jax.Array, bucket: Bucket, first) -> jax.Array:
        """[documents, N, tokens] to [B, T, N]; undefined for rows of other documents."""
        document = self.table.q_document
        row_in_document = jnp.arange(len(document)) - self.table.q_start_D[document]
        index = (document - first) * bucket.num_queries + row_in_document
        lse_rows = lse_DNT.swapaxes(1, 2).reshape(-1, lse_DNT.shape[1])
        return jnp.take(lse_rows, index, axis=0, mode="clip").reshape(*self.q_shape[:2], -1)

    def pack_lse(self, lse_BNT: jax.Array, bucket: Bucket, first) -> jax.Array:
        """The inverse: [documents, N, tokens]; 0 for rows that belong to no document."""
        start, length = (
            lax.dynamic_slice_in_dim(x, first, bucket.num_documents)[:, None]
            for x in (self.table.q_start_D, self.table.q_length_D)
        )
        row_in_document = jnp.arange(bucket.num_queries)
        lse_rows = lse_BNT.swapaxes(1, 2).reshape(-1, lse_BNT.shape[1])
        lse_DTN = jnp.take(lse_rows, start + row_in_document, axis=0, mode="clip")
        return jnp.where(row_in_document < length, lse_DTN.transpose(2, 0, 1), 0.0).swapaxes(0, 1)


def _replace_unwritten(x_BT: jax.Array, document_BT: jax.Array, value: float = 0.0) -> jax.Array:
    return jnp.where(_broadcast(document_BT >= 0, x_BT), x_BT, value)


def _broadcast(mask_BT: jax.Array, x_BT: jax.Array) -> jax.Array:
    return mask_BT.reshape(*mask_BT.shape, *(1,) * (x_BT.ndim - 2))
