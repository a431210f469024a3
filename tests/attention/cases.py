"""Masks that have broken somebody's attention. They are the rows of one batch, so one compilation tests them all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlc.attention import attend, reference
from jaxlc.attention.contract import AttentionSpec, Masks
from jaxlc.config import MeshConfig
from jaxlc.sharding.mesh import make_mesh
from tests.tolerances import max_relative_error

TOKENS = 96

# Lengths of the documents of each row; a negative one is padding.
DOCUMENTS = {
    "one_document": (96,),
    "packed": (40, 3, 29, 24),
    "padded": (61, -35),  # with context >= 3 a rank has nothing but padding in one half
    "padding_first": (-48, 48),  # with context = 2 nothing but rows without keys in a whole chunk
    "all_padding": (-96,),
    "one_token_documents": (1,) * 96,
}
ROWS = len(DOCUMENTS)


def segments() -> np.ndarray:
    """[ROWS, TOKENS] int32."""
    return np.stack(
        [
            np.concatenate([np.full(abs(n), i + 1 if n > 0 else 0) for i, n in enumerate(lengths)])
            for lengths in DOCUMENTS.values()
        ]
    ).astype(np.int32)


def positions() -> np.ndarray:
    """[ROWS, TOKENS] int32: earlier tokens of the same document."""
    return np.stack([np.concatenate([np.arange(abs(n)) for n in lengths]) for lengths in DOCUMENTS.values()]).astype(
        np.int32
    )


def row_offsets(batch: int = ROWS) -> jax.Array:
    """[batch, TOKENS] int32: the same order, told by the place in the row."""
    return jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (batch, TOKENS))


def masks(packed: bool) -> Masks:
    """Of all rows; not packed: no segment ids at all, each row is one document."""
    if packed:
        return Masks.of_row(jnp.asarray(positions()), jnp.asarray(segments()))
    return Masks.of_row(row_offsets(), None)


def inputs(
    batch=ROWS, num_tokens=TOKENS, num_heads=4, num_kv_heads=2, head_dim=16, value_dim=None, dtype=jnp.float32, seed=0
):
    """Random (q_BTNH, k_BSKH, v_BSKH, dout_BTNH)."""
    keys = jax.random.split(jax.random.key(seed), 4)
    value_dim = value_dim or head_dim
    widths = ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, value_dim), (num_heads, value_dim))
    return tuple(jax.random.normal(k, (batch, num_tokens, *w)).astype(dtype) for k, w in zip(keys, widths, strict=True))


def split_mesh(**axes: int) -> Mesh:
    """A mesh of the first devices of this machine."""
    config = MeshConfig(**axes)
    return make_mesh(config, jax.devices()[: config.num_devices])


@functools.cache
def oracle(packed=True, causal=True, dtype=jnp.float32, window=None, **heads):
    """(out, gradients) on one device, in float32, of inputs rounded to `dtype`; heads as in `inputs`."""
    q, k, v, dout = (x.astype(jnp.float32) for x in inputs(dtype=dtype, **heads))

    def objective(q, k, v):
        out, _ = reference.forward(q, k, v, masks(packed), AttentionSpec(causal=causal, window=window))
        return (out * dout).sum(), out

    gradients, out = jax.jit(jax.grad(objective, (0, 1, 2), has_aux=True))(q, k, v)
    return out, gradients


def sharded(mesh, packed=True, causal=True, dtype=jnp.float32, window=None, heads=None, **how):
    """The same through the public door, on a mesh; `how` goes to `attend`."""
    q, k, v, dout = inputs(dtype=dtype, **(heads or {}))
    how.update(causal=causal, window=window, segment_ids=jnp.asarray(segments()) if packed else None)

    def objective(q, k, v):
        out = attend(q, k, v, mesh=mesh, **how)
        return (out * dout).sum(), out

    gradients, out = jax.jit(jax.grad(objective, (0, 1, 2), has_aux=True))(q, k, v)
    return out, gradients


def assert_rows_match(got, wanted, tolerance: float) -> None:
    """Each row of each array apart, so that a row with large values hides no other."""
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        for row in range(theirs.shape[0]):
            if np.abs(theirs[row]).max() < 1e-5:  # 0 but for rounding, as dq and dk of one-token documents are
                assert np.abs(mine[row]).max() < 1e-5, (row, theirs.shape)
            else:
                assert max_relative_error(mine[row], theirs[row]) <= tolerance, (row, theirs.shape)
