"""A stand-in for cuDNN's packed calls: it computes what the operands of a call say.

Arrays are memory: one dimension, read and written at the element offsets of the operands with the
strides of the shapes, as cuDNN does. What cuDNN does not write is NaN here. So results match only
if every length, offset and stride is correct.
"""

import math

import jax
import jax.numpy as jnp

from jaxlc.attention.kernels import cudnn_packed


def install(monkeypatch) -> None:
    """Replaces cuDNN's packed calls until the end of the test."""
    monkeypatch.setattr(cudnn_packed, "cudnn_packed_forward", packed_forward)
    monkeypatch.setattr(cudnn_packed, "cudnn_packed_backward", packed_backward)


class _Memory:
    """The rows of one operand: those of document d start at element offsets[d], num_tokens of them
    are reachable.
    """

    def __init__(self, shape, lengths_BM, offsets):
        (batch, num_tokens, self.num_heads, self.head_dim), self.size = shape, math.prod(shape)
        num_documents = batch * lengths_BM.shape[1]
        assert lengths_BM.dtype == offsets.dtype == jnp.int32
        assert (
            lengths_BM.shape[0] == offsets.shape[0] == batch
            and offsets.shape[1] == lengths_BM.shape[1] + 1 > 2
        )
        # the entry after them is the end of the array
        offsets = offsets.reshape(-1)[:num_documents]
        row = jnp.arange(num_tokens)
        self.is_row_DT = row < lengths_BM.reshape(-1, 1)
        row_stride = self.num_heads * self.head_dim
        self.element_DTNH = (
            offsets[:, None, None, None]
            + row[:, None, None] * row_stride
            + jnp.arange(row_stride).reshape(self.num_heads, self.head_dim)
        )

    def read(self, x):
        x_DTNH = jnp.take(x.reshape(-1), self.element_DTNH, mode="fill", fill_value=jnp.nan).astype(
            jnp.float32
        )
        return jnp.where(self.is_row_DT[:, :, None, None], x_DTNH, 0.0)

    def written(self, x_DTNH, like):
        index = jnp.where(self.is_row_DT[:, :, None, None], self.element_DTNH, self.size)
        written = (
            jnp.full(self.size, jnp.nan, like.dtype)
            .at[index]
            .set(x_DTNH.astype(like.dtype), mode="drop")
        )
        return written.reshape(like.shape)


def _scores(q, k, is_query_DT, is_key_DS, scale, causal):
    """[documents, N, T, S], -inf where a query does not attend to a key."""
    scores = scale * jnp.einsum("DTNH,DSNH->DNTS", q, k)
    mask = is_query_DT[:, :, None] & is_key_DS[:, None, :]
    if causal:
        mask &= jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    return jnp.where(mask[:, None], scores, -jnp.inf)


def _memories(q, k, q_lengths, kv_lengths, q_offsets, kv_offsets):
    return _Memory(q.shape, q_lengths, q_offsets), _Memory(k.shape, kv_lengths, kv_offsets)


def packed_forward(q, k, v, packed, *, scale, causal):
    q_memory, k_memory = _memories(q, k, *packed)
    groups = q.shape[2] // k.shape[2]
    k_D, v_D = (jnp.repeat(k_memory.read(x), groups, axis=2) for x in (k, v))
    scores = _scores(q_memory.read(q), k_D, q_memory.is_row_DT, k_memory.is_row_DT, scale, causal)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
    out = jnp.einsum("DNTS,DSNH->DTNH", p, v_D)
    return q_memory.written(out, q), jnp.where(q_memory.is_row_DT[:, None], lse, jnp.nan)


def packed_backward(q, k, v, packed, out, lse, dout, *, scale, causal):
    q_memory, k_memory = _memories(q, k, *packed)
    num_kv_heads, groups = k.shape[2], q.shape[2] // k.shape[2]
    q_D, out_D, dout_D = (q_memory.read(x) for x in (q, out, dout))
    k_D, v_D = (jnp.repeat(k_memory.read(x), groups, axis=2) for x in (k, v))
    scores = _scores(q_D, k_D, q_memory.is_row_DT, k_memory.is_row_DT, scale, causal)
    p = jnp.where(jnp.isfinite(scores), jnp.exp(scores - lse[..., None]), 0.0)
    dp = jnp.einsum("DTNH,DSNH->DNTS", dout_D, v_D)
    delta = jnp.einsum("DTNH,DTNH->DNT", dout_D, out_D)
    ds = scale * p * (dp - delta[..., None])
    dq = jnp.einsum("DNTS,DSNH->DTNH", ds, k_D)
    dk, dv = jnp.einsum("DNTS,DTNH->DSNH", ds, q_D), jnp.einsum("DNTS,DTNH->DSNH", p, dout_D)
    dk, dv = (x.reshape(*x.shape[:2], num_kv_heads, groups, -1).sum(3) for x in (dk, dv))
    return q_memory.written(dq, q), k_memory.written(dk, k), k_memory.written(dv, v)
