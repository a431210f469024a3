"""Softmax attention: N query heads share K key/value heads (Ainslie et al. 2023).

Parameters and projections, layers in tiles, and attention of new tokens over the KV cache. What
crosses ranks in training is in `jaxlc.attention`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from jaxlc.attention.contract import KeysValues
from jaxlc.attention.kernels.choose import KernelSelection
from jaxlc.attention.query_tiles import TiledAttention, make_tiled
from jaxlc.attention.strategies import sharded_attention
from jaxlc.config import ModelConfig
from jaxlc.core import CONTEXT, TENSOR, num_replicas, scopes
from jaxlc.models.block import Init, RMSNorm, add_bias, bias_vector, scaled
from jaxlc.models.cached_attention import KV, CachedAttention, kv_spec
from jaxlc.models.contract import (
    BatchTokens,
    CacheLayout,
    ChoosesKernel,
    KindOnMesh,
    Mixer,
    OnTiles,
    OnTrees,
    Rotary,
    Rotation,
    Sequences,
    Tiles,
)
from jaxlc.models.layer_tiles import Mixing, add_of_tiles, tile_indices
from jaxlc.models.rope import apply_rope, query_scale
from jaxlc.sharding.rules import Sharder


class SoftmaxAttention(Mixer, Rotary, OnTiles, OnTrees, ChoosesKernel):
    """Mixers with queries, keys and values of heads: what is computed between their projections.

    A subclass has the methods `queries`, `keys_values` and `projected`, as `Attention`.
    """

    sinks: nnx.Param | None = None

    def __init__(self, model: ModelConfig, init: Init):
        super().__init__(model, init)
        # Attention divides its logits by sqrt(head_dim).
        sizes = model.attention
        scale_dim = sizes.query_scale_dim or sizes.head_dim
        self.is_interleaved = sizes.interleaved
        self.query_multiplier = (sizes.head_dim / scale_dim) ** 0.5
        self.query_scale = functools.partial(query_scale, model) if model.rope.query_beta else None

    def operands(
        self, x_BTD: jax.Array, rotation: Rotation, *, shard: Sharder
    ) -> tuple[tuple, jax.Array | None]:
        """Returns (q_BTNH, k_BTKH, v_BTKH, sinks_N or None), and the gate_BTNH of `projected`, or
        None.
        """
        q_BTNH, gate_BTNH = self.queries(x_BTD, rotation, shard=shard)
        k_BTKH, v_BTKH = self.keys_values(x_BTD, rotation, shard=shard)
        return (q_BTNH, k_BTKH, v_BTKH, self.sinks_N), gate_BTNH

    def scaled_queries(self, q_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
        """Queries times their factors."""
        factor = self.query_multiplier
        if self.query_scale is not None and rotation.tables is not None:
            factor *= self.query_scale(rotation.positions_BT)
        return scaled(q_BTNH, factor)

    def rotated(self, x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
        """Queries or keys with RoPE. Interleaved pairs are put into the half-split order, of both."""
        if self.is_interleaved and rotation.tables is not None:
            dim = 2 * rotation.tables.low_cos.shape[-1]
            pairs = x_BTNH[..., :dim].reshape(*x_BTNH.shape[:-1], -1, 2)
            halves = pairs.swapaxes(-1, -2).reshape(*x_BTNH.shape[:-1], dim)
            x_BTNH = jnp.concatenate([halves, x_BTNH[..., dim:]], axis=-1)
        return apply_rope(x_BTNH, *rotation)

    @property
    def sinks_N(self) -> jax.Array | None:
        """The attention sinks, float32; None: the layer has none."""
        return None if self.sinks is None else self.sinks[...]

    @classmethod
    def sharded(cls, on: KindOnMesh) -> sharded_attention.ShardedAttention:
        """Attention of whole sequences on the mesh."""
        return sharded_attention.make(
            on.config.attention,
            on.mesh,
            window=on.window,
            few_documents=on.few_documents,
            skips_ring_steps=on.skips_ring_steps,
            shared_prefixes=on.config.attention.shared_prefixes,
            deterministic=on.config.runtime.deterministic,
        )

    @classmethod
    def on_sequences(cls, on: KindOnMesh) -> Sequences:
        sharded = cls.sharded(on)

        def prepare(tokens: BatchTokens):
            # Without segments, the mask is implicit.
            return None if tokens.segments_BT is None else _prepared(sharded, on, tokens)

        def attend(q_BTNH, k_BTKH, v_BTKH, sinks_N, *, ranges):
            return sharded(q_BTNH, k_BTKH, v_BTKH, ranges, sinks_N)[0]

        return Sequences(prepare, attend)

    @classmethod
    def on_tiles(cls, on: KindOnMesh) -> Tiles:
        settings = on.config.attention
        tiled = make_tiled(
            settings,
            on.mesh,
            tiles=on.num_tiles,
            num_kv_heads=on.model.attention.num_kv_heads,
            window=on.window,
            shared_prefixes=settings.shared_prefixes,
            deterministic=on.config.runtime.deterministic,
        )

        prepare = functools.partial(_prepared, tiled, on)
        return Tiles(prepare, AttentionTiles(tiled))

    @classmethod
    def kernel(cls, on: KindOnMesh) -> KernelSelection:
        return choose_kernel(on)

    @classmethod
    def abstract_cache(
        cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, num_layers: int, dtype
    ) -> "KV":
        num_tokens = on.window or layout.max_tokens
        num_heads = _num_cached_heads(on)
        shape = batch_size, num_layers, num_tokens, num_heads, on.model.attention.head_dim
        array = jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(on.mesh, kv_spec(on.window))
        )
        return KV(array, array)

    @classmethod
    def cached(
        cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, chunk_tokens: int
    ) -> "CachedAttention":
        return CachedAttention(
            config=on.config.attention,
            mesh=on.mesh,
            layout=layout,
            window=on.window,
            q_like=_abstract_queries(on, (batch_size, chunk_tokens)),
            num_kv_heads=_num_cached_heads(on),
        )


class Attention(SoftmaxAttention):
    """Projections, norms of queries and keys, RoPE, sinks and the output gate."""

    def __init__(self, model: ModelConfig, init: Init):
        super().__init__(model, init)
        sizes = model.attention
        N = sizes.num_heads
        K = sizes.num_kv_heads
        H = sizes.head_dim
        self.multipliers = (("attention_projected", sizes.output_multiplier),)
        self.bq = bias_vector(sizes.qkv_bias, heads=N, bias=sizes.query_dim)
        self.bk = bias_vector(sizes.qkv_bias, kv_heads=K, bias=H)
        self.bv = bias_vector(sizes.qkv_bias, kv_heads=K, bias=H)
        self.bo = bias_vector(sizes.out_bias, bias=model.model_dim)
        self.sinks = nnx.Param(jnp.zeros(N, jnp.float32), dims=("sinks",)) if sizes.sinks else None
        self.has_gate = sizes.gate
        self.has_gate_projection = sizes.gate_projection
        self.q_norm = _qk_norm(model, heads=N)
        self.k_norm = _qk_norm(model, kv_heads=K)

    @jax.named_scope(scopes.ATTENTION)
    def queries(
        self, x_BTD: jax.Array, rotation: Rotation, *, shard: Sharder
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns q_BTNH, with RoPE, and the gate_BTNH of `projected`, or None. `x_BTD` is the
        input of the block, gathered over tensor."""
        q_BTNH = shard.heads(self.project("query", "BTD,DNH->BTNH", x_BTD, shard=shard))
        q_BTNH = add_bias(q_BTNH, self.bq)
        gate_BTNH = None
        if self.has_gate_projection:
            gate_BTNH = self.project("attention_gate", "BTD,DNH->BTNH", x_BTD, shard=shard)
            gate_BTNH = checkpoint_name(shard.heads(gate_BTNH), "query")
        elif self.has_gate:
            # the matrix has first q, then the gate
            q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
            gate_BTNH = checkpoint_name(gate_BTNH, "query")
        if self.q_norm is not None:
            q_BTNH = self.q_norm(q_BTNH)
        q_BTNH = self.scaled_queries(q_BTNH, rotation)
        return checkpoint_name(self.rotated(q_BTNH, rotation), "query"), gate_BTNH

    @jax.named_scope(scopes.ATTENTION)
    def keys_values(self, x_BTD: jax.Array, rotation: Rotation, *, shard: Sharder) -> KeysValues:
        """Returns (k_BTKH, v_BTKH), K with RoPE. `x_BTD` is the input of the block, gathered over
        tensor.
        """
        k_BTKH = shard.heads(self.project("key", "BTD,DKH->BTKH", x_BTD, shard=shard))
        v_BTKH = shard.heads(self.project("value", "BTD,DKH->BTKH", x_BTD, shard=shard))
        k_BTKH = add_bias(k_BTKH, self.bk)
        v_BTKH = add_bias(v_BTKH, self.bv)
        if self.k_norm is not None:
            k_BTKH = self.k_norm(k_BTKH)
        return checkpoint_name(self.rotated(k_BTKH, rotation), "key"), checkpoint_name(
            v_BTKH, "value"
        )

    @jax.named_scope(scopes.ATTENTION)
    def projected(
        self, out_BTNH: jax.Array, gate_BTNH: jax.Array | None, *, shard: Sharder
    ) -> jax.Array:
        """The output projection, out_BTD. With a gate, out_BTNH is multiplied by its sigmoid first."""
        out_BTNH = shard.heads(out_BTNH)
        if gate_BTNH is not None:
            gated_BTNH = out_BTNH.astype(jnp.float32) * jax.nn.sigmoid(
                gate_BTNH.astype(jnp.float32)
            )
            out_BTNH = gated_BTNH.astype(out_BTNH.dtype)
        out_BTD = self.project("attention_projected", "BTNH,NHD->BTD", out_BTNH, shard=shard)
        return checkpoint_name(add_bias(shard.residual(out_BTD), self.bo), "attention_projected")


def choose_kernel(on: KindOnMesh, value_dim: int | None = None) -> KernelSelection:
    """The kernel of training, for values of this width; None: that of queries and keys."""
    config = on.config
    sizes = on.mesh.shape
    num_sequences = config.train.global_batch_size // (
        config.train.gradient_accumulation_steps * num_replicas(sizes)
    )
    num_tokens = config.memory.tile_tokens or config.data.seq_len // sizes[CONTEXT]
    return sharded_attention.choose(
        config.attention,
        on.mesh,
        dtype=on.compute_dtype,
        head_dim=on.model.attention.head_dim,
        value_dim=value_dim,
        window=on.window,
        packed=config.attention.document_mask
        or (on.window is not None and config.memory.tile_tokens > 0),
        num_elements=num_sequences
        * num_tokens
        * on.model.attention.num_heads
        // sizes[TENSOR]
        * on.model.attention.head_dim,
        shared_prefixes=config.attention.shared_prefixes,
        deterministic=config.runtime.deterministic,
    )


def _prepared(
    attention: sharded_attention.ShardedAttention | TiledAttention,
    on: KindOnMesh,
    tokens: BatchTokens,
) -> Any:
    """The key ranges of a batch."""
    q_like = _abstract_queries(on, tokens.positions_BT.shape)
    return attention.prepare(tokens.positions_BT, tokens.segments_BT, q_like, tokens.prefixes_BTD)


def _abstract_queries(on: KindOnMesh, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """q_BTNH; `shape` is [B, T]."""
    return jax.ShapeDtypeStruct(
        (*shape, on.model.attention.num_heads, on.model.attention.head_dim), on.compute_dtype
    )


def _num_cached_heads(on: KindOnMesh) -> int:
    """Key/value heads in the cache: repeated if the tensor axis is larger."""
    return max(on.model.attention.num_kv_heads, on.mesh.shape[TENSOR])


def _qk_norm(model: ModelConfig, **heads: int) -> RMSNorm | None:
    """The norm of queries or keys; `heads` has the name and size of the dimension of heads."""
    sizes = model.attention
    if sizes.qk_norm == "none":
        return None
    dims = (heads if sizes.qk_norm == "projection" else {}) | {"norm": sizes.head_dim}
    return RMSNorm(epsilon=model.norm_epsilon, zero_centered=model.zero_centered_norm, **dims)


class AttentionTiles(NamedTuple):
    """The `TileMixer` of attention: only x, K and V exist at full sequence length.

    Before the tiles, K and V of all tokens are computed. The backward pass recomputes them; after
    the tiles, it adds the gradients that those of K and V give.
    """

    attention: TiledAttention

    def start(self, mixer, x_nBtD, positions_nBt, ranges) -> Mixing:
        attention = self.attention
        tables = mixer.layer.tables
        shard = mixer.layer.shard

        def keys_values(x_BtD, positions_Bt):
            def project(own, input_BtD):
                return own.keys_values(input_BtD, Rotation(positions_Bt, tables), shard=shard)

            return mixer.run(project, x_BtD)

        kv = self._all(lambda *tile: keys_values(*tile)[0], x_nBtD, positions_nBt, ranges)

        def run(x_BtD, positions_Bt, tile, for_tile, saved):
            def project(own, input_BtD):
                queries = own.queries(input_BtD, Rotation(positions_Bt, tables), shard=shard)
                return *queries, own.sinks_N

            (q_BtNH, gate_BtNH, sinks_N), queries_vjp = mixer.run(project, x_BtD)
            results = saved or attention.forward(q_BtNH, kv, tile, ranges, sinks_N)

            def gradients(dout_BtNH, dgate_BtNH, dkv):
                dq_BtNH, dkv, dsinks_N = attention.backward(
                    q_BtNH, kv, dkv, tile, *results, dout_BtNH, ranges, sinks_N
                )
                dqueries = dq_BtNH.astype(q_BtNH.dtype), dgate_BtNH, dsinks_N
                return queries_vjp(dqueries), dkv, for_tile

            return results, gate_BtNH, gradients

        def finish(gradients, dkv, _):
            dkv = attention.add_exchanged(dkv, ranges)

            def tile_backward(tile, *own):
                k_v, keys_values_vjp = keys_values(*own)
                return keys_values_vjp(
                    jax.tree.map(
                        lambda d, like: d.astype(like.dtype), attention.take(dkv, tile), k_v
                    )
                )

            return add_of_tiles(tile_backward, gradients, x_nBtD, positions_nBt)[0]

        return Mixing(None, kv, run, finish)

    def _all(self, keys_values: Callable, x_nBtD, positions_nBt, ranges: Any) -> jax.Array:
        """K and V of all tokens, in the layout of the tile attention, after its exchange."""
        attention = self.attention
        abstract_tile = jax.eval_shape(keys_values, x_nBtD[0], positions_nBt[0])

        def put(kv, operands):
            tile, *own = operands
            return attention.put(kv, *keys_values(*own), tile), None

        batch, tile_tokens, _, head_dim = abstract_tile[0].shape
        empty = attention.empty(batch, len(x_nBtD) * tile_tokens, head_dim, x_nBtD.dtype)
        # The zeros depend on x, so that they are not allocated before it.
        x_nBtD, zero = lax.optimization_barrier((x_nBtD, jnp.zeros((), empty.dtype)))
        kv, _ = lax.scan(put, empty + zero, (tile_indices(x_nBtD), x_nBtD, positions_nBt))
        return attention.exchange(kv, ranges)
