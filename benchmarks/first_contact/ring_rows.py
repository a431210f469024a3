"""Part ring: the cost of splitting attention into ring steps and into steps over KV blocks, on one
device.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import ring_steps
from benchmarks.first_contact.attention_inputs import random_inputs, supported_kernels
from benchmarks.first_contact.rows import Row
from benchmarks.first_contact.sizes import Heads, Sizes
from jaxlc.attention.contract import AttentionSpec
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.attention.query_tiles import make_tiled
from jaxlc.config import AttentionConfig, MeshConfig
from jaxlc.search.measure import seconds_of_calls
from jaxlc.sharding.mesh import make_mesh


def ring_rows(sizes: Sizes) -> Iterator[Row]:
    for num_tokens, heads in sizes.ring_cases:
        for name in supported_kernels(heads, sizes.dtype):
            if name != "blockwise" or num_tokens <= sizes.blockwise_max_tokens:
                labels = dict(kernel=name, heads=str(heads), tokens=num_tokens)
                measure = functools.partial(_ring_steps, sizes, name, num_tokens, heads)
                yield Row(labels=labels | dict(split="ring steps"), measure=measure, seconds=60)
        for kv_tokens in sizes.kv_tokens_per_step:
            labels = dict(
                split="query tiles",
                heads=str(heads),
                tokens=num_tokens,
                kv_tokens_per_step=kv_tokens,
            )
            measure = functools.partial(_query_tiles, sizes, num_tokens, heads, kv_tokens)
            yield Row(labels=labels, measure=measure, seconds=40)


def _ring_steps(sizes: Sizes, name: str, num_tokens: int, heads: Heads) -> dict:
    q, k, v, _ = random_inputs(heads, num_tokens, sizes.dtype)
    return ring_steps.measure(
        KERNELS[name], AttentionSpec(), q, k, v, sizes.ring_ranks, sizes.repeats
    )


def _query_tiles(sizes: Sizes, num_tokens: int, heads: Heads, kv_tokens: int) -> dict:
    """Forward passes of all tiles over all keys, and one call over the whole sequence."""
    q, k, v, _ = random_inputs(heads, num_tokens, sizes.dtype)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    tiled = make_tiled(
        AttentionConfig(document_mask=False),
        mesh,
        tiles=sizes.tiles,
        num_kv_heads=heads.num_kv_heads,
        kv_tokens_per_step=kv_tokens,
    )
    name = supported_kernels(heads, sizes.dtype)[0]

    @jax.jit
    def tiles(q, k, v):
        def split(x):
            return jnp.moveaxis(x.reshape(1, sizes.tiles, -1, *x.shape[2:]), 1, 0)

        kv = tiled.empty(1, num_tokens, heads.head_dim, q.dtype)
        indices = jnp.arange(sizes.tiles)
        kv = lax.scan(lambda kv, x: (tiled.put(kv, *x), None), kv, (split(k), split(v), indices))[0]
        return lax.map(lambda x: tiled.forward(x[0], kv, x[1], None), (split(q), indices))

    one_call = jax.jit(lambda q, k, v: KERNELS[name].forward(q, k, v, None, AttentionSpec()))
    tiles_seconds = min(seconds_of_calls(tiles, q, k, v, repeats=sizes.repeats))
    whole_seconds = min(seconds_of_calls(one_call, q, k, v, repeats=sizes.repeats))
    return dict(kernel=name, tiles_seconds=tiles_seconds, whole_seconds=whole_seconds,
                tiles_over_whole=tiles_seconds / whole_seconds)  # fmt: skip
