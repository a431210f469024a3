"""A stand-in for the FFI targets of fa3: it computes what the operands and attributes of a call say.

What a target need not write is NaN here: rows of queries in segments without keys, rows of keys in
segments without queries, rows after `max_seqlen` of a segment, and scratch. Operands are read with
their own offsets. So results match only if every offset and attribute is correct.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.attention.kernels import fa3

PREFIX = "dew_flash3_mha_"
_DTYPES = {
    "softmax_scale": np.float64,
    "is_causal": bool,
    "window_size_left": np.int64,
    "window_size_right": np.int64,
}
_LENGTHS = {"max_seqlen": np.int64, "max_seqlen_k": np.int64}


def install(monkeypatch) -> None:
    """Replaces the calls until the end of the test, on all devices."""
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    monkeypatch.setattr(fa3, "unsupported", lambda problem: None)


def ffi_call(name: str, result_types):
    """As `jax.ffi.ffi_call`; checks the types of attributes and the shapes of results."""

    def call(*operands, **attributes):
        varlen, direction = "varlen" in name, name.rpartition("_")[2]
        assert name == PREFIX + ("varlen_" if varlen else "") + direction
        types = _DTYPES | (_LENGTHS if varlen else {})
        assert {key: type(value) for key, value in attributes.items()} == types
        compute = _forward if direction == "fwd" else _backward
        num_offsets = 2 if varlen else 0
        arrays, offsets = (
            operands[: len(operands) - num_offsets],
            operands[len(operands) - num_offsets :],
        )
        if varlen:
            results = compute(arrays, _segments(arrays, offsets, direction), attributes)
        else:
            results = [compute(list(x), None, attributes) for x in zip(*arrays)]
            results = tuple(map(jnp.stack, zip(*results)))
        num_scratch = len(result_types) - len(results)
        assert num_scratch == 2
        scratch = tuple(jnp.full(x.shape, jnp.nan, x.dtype) for x in result_types[-2:])
        results = tuple(x.astype(y.dtype) for x, y in zip(results, result_types)) + scratch
        assert [x.shape for x in results] == [x.shape for x in result_types]
        if direction == "bwd":
            q = operands[1]
            tokens = q.shape[0] if varlen else q.shape[0] * q.shape[1]
            sequences = len(offsets[0]) - 1 if varlen else len(q)
            heads = q.shape[-2]
            assert all(x.size == heads * (tokens + 128 * (sequences + 1)) for x in scratch)
        return results

    return call


def _segments(arrays, offsets, direction: str):
    q, k = arrays[direction == "bwd" :][:2]
    q_offsets, kv_offsets = offsets
    assert q_offsets.dtype == kv_offsets.dtype == jnp.int32 and q_offsets.shape == kv_offsets.shape
    parts = []
    for offsets, num_tokens in ((q_offsets, len(q)), (kv_offsets, len(k))):
        row = jnp.arange(num_tokens)
        segment = (offsets[1:, None] <= row).sum(0)
        last = len(offsets) - 2
        start, end = (offsets[jnp.minimum(segment, last) + i] for i in (0, 1))
        parts.append((jnp.where(segment > last, -1, segment), row - start, end - start))
    (q_segment, q_row, q_length), (k_segment, k_row, k_length) = parts
    # descending offsets, or ones that do not end with the arrays, are wrong everywhere
    is_valid = (jnp.diff(q_offsets) >= 0).all() & (jnp.diff(kv_offsets) >= 0).all()
    is_valid &= (q_offsets[0] == 0) & (q_offsets[-1] == len(q))
    is_valid &= (kv_offsets[0] == 0) & (kv_offsets[-1] == len(k))
    return (q_segment, q_row, q_length), (k_segment, k_row, k_length), is_valid


def _mask(q, k, segments, attributes):
    """(mask [T, S], queries that are written, keys that are written)"""
    if segments is None:
        whole = [
            (jnp.zeros(len(x), int), jnp.arange(len(x)), jnp.full(len(x), len(x))) for x in (q, k)
        ]
        segments = (*whole, True)
    (q_segment, q_row, q_length), (k_segment, k_row, k_length), is_valid = segments
    same = q_segment[:, None] == k_segment
    # the last query is aligned with the last key
    distance = (q_row - q_length)[:, None] - (k_row - k_length)
    left, right = attributes["window_size_left"], attributes["window_size_right"]
    mask = same
    if attributes["is_causal"]:
        assert right in (-1, 0)
        mask &= distance >= 0
    if left >= 0:
        mask &= distance <= left
    writes_query = is_valid & same.any(1) & (q_row < attributes.get("max_seqlen", len(q)))
    writes_key = is_valid & same.any(0) & (k_row < attributes.get("max_seqlen_k", len(k)))
    return mask, writes_query, writes_key


def _scores(q, k, mask, attributes):
    groups = q.shape[1] // k.shape[1]
    k = jnp.repeat(k, groups, axis=1)
    q, k = (x.astype(jnp.float32) for x in (q, k))
    return jnp.where(mask, attributes["softmax_scale"] * jnp.einsum("tnh,snh->nts", q, k), -jnp.inf)


def _written(x, is_written, axis=0):
    shape = [1] * x.ndim
    shape[axis] = -1
    return jnp.where(is_written.reshape(shape), x, jnp.nan)


def _forward(arrays, segments, attributes):
    q, k, v = arrays
    mask, writes_query, _ = _mask(q, k, segments, attributes)
    scores = _scores(q, k, mask, attributes)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.where(mask, jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]), 0.0)
    v = jnp.repeat(v, q.shape[1] // v.shape[1], axis=1).astype(jnp.float32)
    out = jnp.einsum("nts,snh->tnh", p, v)
    return _written(out, writes_query), _written(lse, writes_query, 1)


def _backward(arrays, segments, attributes):
    dout, q, k, v, out, lse = arrays
    assert dout.dtype == out.dtype == q.dtype and lse.dtype == jnp.float32
    mask, writes_query, writes_key = _mask(q, k, segments, attributes)
    scores = _scores(q, k, mask, attributes)
    p = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0.0)
    num_kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    k_N, v_N = (jnp.repeat(x, groups, axis=1).astype(jnp.float32) for x in (k, v))
    q, dout, out = (x.astype(jnp.float32) for x in (q, dout, out))
    delta = jnp.einsum("tnh,tnh->nt", dout, out)
    dp = jnp.einsum("tnh,snh->nts", dout, v_N)
    ds = jnp.where(mask, attributes["softmax_scale"] * p * (dp - delta[..., None]), 0.0)
    dq = jnp.einsum("nts,snh->tnh", ds, k_N)
    dk, dv = jnp.einsum("nts,tnh->snh", ds, q), jnp.einsum("nts,tnh->snh", p, dout)
    dk, dv = (x.reshape(len(x), num_kv_heads, groups, -1).sum(2) for x in (dk, dv))
    return _written(dq, writes_query), _written(dk, writes_key), _written(dv, writes_key)
