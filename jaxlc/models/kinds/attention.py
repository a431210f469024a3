"""Softmax attention: N query heads share K key/value heads (Ainslie et al. 2023).

Parameters and projections, layers in tiles, and attention of new tokens over the KV cache. What crosses ranks in
training is in `jaxlc.attention`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.attention import contract
from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Kernel, KeyRanges, prepared
from jaxlc.attention.kernels import cudnn
from jaxlc.attention.kernels.choose import KERNELS, KernelSelection, choose_kernel
from jaxlc.attention.merge import merge, merge_parts
from jaxlc.attention.query_tiles import TiledAttention, make_tiled
from jaxlc.attention.strategies import sharded_attention
from jaxlc.attention.strategies.strategy import repeat_heads
from jaxlc.config import AttentionConfig, LoraConfig, ModelConfig
from jaxlc.config.kinds import mixer_matrices
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.core.errors import Unsupported
from jaxlc.models.block import InitKeys, RMSNorm, add_bias, bias_vector, residual_depth_scale, weight
from jaxlc.models.cache import CacheLayout, NewTokens, decode_tokens
from jaxlc.models.contract import (
    BatchTokens,
    CachedKernels,
    ChoosesKernel,
    KindOnMesh,
    LayerOutput,
    Mixer,
    OnTiles,
    OnTrees,
    Rotary,
    Rotation,
    Sequences,
    Tiles,
)
from jaxlc.models.layer_tiles import TiledLayer, add, at, put_at, tile_indices
from jaxlc.models.matmuls import Fp8
from jaxlc.models.offloaded_layers import LayerParams, Prefetch, schedule_after
from jaxlc.models.rope import apply_rope
from jaxlc.sharding.rules import Sharder


class Attention(Mixer, Rotary, OnTiles, OnTrees, ChoosesKernel):
    """Projections, norms of queries and keys, RoPE, sinks and the output gate."""

    def __init__(self, model: ModelConfig, keys: InitKeys, fp8: Fp8 | None = None, lora: LoraConfig | None = None):
        super().__init__(model, keys, fp8, lora, ("query", "key", "value", "attention_projected"))
        D, N, K, H = model.model_dim, model.num_heads, model.num_kv_heads, model.head_dim
        weights = mixer_matrices(model)
        self.wq = weight(keys, weights["wq"])  # with a gate: first q, then the gate
        self.wk = weight(keys, weights["wk"])
        self.wv = weight(keys, weights["wv"])
        self.wo = weight(keys, weights["wo"], residual_depth_scale(model))
        self.bq = bias_vector(heads=N, bias=model.query_dim) if model.qkv_bias else None
        self.bk = bias_vector(kv_heads=K, bias=H) if model.qkv_bias else None
        self.bv = bias_vector(kv_heads=K, bias=H) if model.qkv_bias else None
        self.bo = bias_vector(bias=D) if model.attention_out_bias else None
        self.sinks = nnx.Param(jnp.zeros(N, jnp.float32), dims=("sinks",)) if model.attention_sinks else None
        self.has_gate = model.attention_gate
        self.q_norm = _qk_norm(model, heads=N)
        self.k_norm = _qk_norm(model, kv_heads=K)
        # Attention divides its logits by sqrt(head_dim).
        self.query_multiplier = (H / model.query_scale_dim) ** 0.5 if model.query_scale_dim else 1.0

    def operands(self, x_BTD: jax.Array, rotation: Rotation, *, shard: Sharder) -> tuple[tuple, jax.Array | None]:
        """Returns (q_BTNH, k_BTKH, v_BTKH, sinks_N or None), and the gate_BTNH of `projected`, or None."""
        q_BTNH, gate_BTNH = self.queries(x_BTD, rotation, shard=shard)
        k_BTKH, v_BTKH = self.keys_values(x_BTD, rotation, shard=shard)
        return (q_BTNH, k_BTKH, v_BTKH, self.sinks_N), gate_BTNH

    @jax.named_scope(scopes.ATTENTION)
    def queries(self, x_BTD: jax.Array, rotation: Rotation, *, shard: Sharder) -> tuple[jax.Array, jax.Array | None]:
        """Returns q_BTNH, with RoPE, and the gate_BTNH of `projected`, or None. `x_BTD` is the input of the block,
        gathered over tensor."""
        q_BTNH = shard.heads(self.project("query", "BTD,DNH->BTNH", x_BTD, self.wq, shard=shard))
        q_BTNH, gate_BTNH = add_bias(q_BTNH, self.bq), None
        if self.has_gate:
            q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
            gate_BTNH = checkpoint_name(gate_BTNH, "query")
        if self.q_norm is not None:
            q_BTNH = self.q_norm(q_BTNH)
        if self.query_multiplier != 1:
            q_BTNH = (self.query_multiplier * q_BTNH.astype(jnp.float32)).astype(q_BTNH.dtype)
        return checkpoint_name(apply_rope(q_BTNH, *rotation), "query"), gate_BTNH

    @jax.named_scope(scopes.ATTENTION)
    def keys_values(self, x_BTD: jax.Array, rotation: Rotation, *, shard: Sharder) -> tuple[jax.Array, jax.Array]:
        """Returns (k_BTKH, v_BTKH), K with RoPE. `x_BTD` is the input of the block, gathered over tensor."""
        k_BTKH = shard.heads(self.project("key", "BTD,DKH->BTKH", x_BTD, self.wk, shard=shard))
        v_BTKH = shard.heads(self.project("value", "BTD,DKH->BTKH", x_BTD, self.wv, shard=shard))
        k_BTKH, v_BTKH = add_bias(k_BTKH, self.bk), add_bias(v_BTKH, self.bv)
        if self.k_norm is not None:
            k_BTKH = self.k_norm(k_BTKH)
        return checkpoint_name(apply_rope(k_BTKH, *rotation), "key"), checkpoint_name(v_BTKH, "value")

    @jax.named_scope(scopes.ATTENTION)
    def projected(self, out_BTNH: jax.Array, gate_BTNH: jax.Array | None, *, shard: Sharder) -> jax.Array:
        """The output projection, out_BTD. With a gate, out_BTNH is multiplied by its sigmoid first."""
        out_BTNH = shard.heads(out_BTNH)
        if gate_BTNH is not None:
            gated_BTNH = out_BTNH.astype(jnp.float32) * jax.nn.sigmoid(gate_BTNH.astype(jnp.float32))
            out_BTNH = gated_BTNH.astype(out_BTNH.dtype)
        out_BTD = self.project("attention_projected", "BTNH,NHD->BTD", out_BTNH, self.wo, shard=shard)
        return checkpoint_name(add_bias(shard.residual(out_BTD), self.bo), "attention_projected")

    @property
    def sinks_N(self) -> jax.Array | None:
        """The attention sinks, float32; None: the layer has none."""
        return None if self.sinks is None else self.sinks[...]

    @classmethod
    def on_sequences(cls, on: KindOnMesh) -> Sequences:
        settings = on.config.attention
        sharded = sharded_attention.make(
            settings,
            on.mesh,
            window=on.window,
            few_documents=on.few_documents,
            skips_ring_steps=on.skips_ring_steps,
            shared_prefixes=settings.shared_prefixes,
        )

        def prepare(tokens: BatchTokens):
            if tokens.segments_BT is None:  # the mask is implicit
                return None
            q_like = _abstract_queries(on, tokens.positions_BT.shape)
            return sharded.prepare(tokens.positions_BT, tokens.segments_BT, q_like, tokens.prefixes_BT)

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
            num_kv_heads=on.model.num_kv_heads,
            window=on.window,
            shared_prefixes=settings.shared_prefixes,
        )

        def prepare(tokens: BatchTokens):
            if tokens.segments_BT is None:
                return tiled.prepare(tokens.positions_BT, None)
            q_like = _abstract_queries(on, tokens.positions_BT.shape)
            prefixes = {} if tokens.prefixes_BT is None else dict(prefixes_BT=tokens.prefixes_BT)
            return tiled.prepare(tokens.positions_BT, tokens.segments_BT, q_like, **prefixes)

        return Tiles(prepare, AttentionLayer, tiled)

    @classmethod
    def kernel(cls, on: KindOnMesh) -> KernelSelection:
        config, sizes = on.config, on.mesh.shape
        num_sequences = config.train.global_batch_size // (
            config.train.gradient_accumulation_steps * math.prod(sizes[axis] for axis in BATCH_AXES)
        )
        num_tokens = config.memory.tile_tokens or config.data.seq_len // sizes[CONTEXT]
        return sharded_attention.choose(
            config.attention,
            on.mesh,
            dtype=on.compute_dtype,
            head_dim=on.model.head_dim,
            window=on.window,
            packed=config.attention.document_mask or (on.window is not None and config.memory.tile_tokens > 0),
            num_elements=num_sequences * num_tokens * on.model.num_heads // sizes[TENSOR] * on.model.head_dim,
        )

    @classmethod
    def abstract_cache(cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, num_layers: int, dtype) -> "KV":
        num_tokens, num_heads = on.window or layout.max_tokens, _num_cached_heads(on)
        shape = batch_size, num_layers, num_tokens, num_heads, on.model.head_dim
        array = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on.mesh, _kv_spec(on.window)))
        return KV(array, array)

    @classmethod
    def cached(cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, chunk_tokens: int) -> "CachedAttention":
        return CachedAttention(
            config=on.config.attention,
            mesh=on.mesh,
            layout=layout,
            window=on.window,
            q_like=_abstract_queries(on, (batch_size, chunk_tokens)),
            num_kv_heads=_num_cached_heads(on),
        )


def _abstract_queries(on: KindOnMesh, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """q_BTNH; `shape` is [B, T]."""
    return jax.ShapeDtypeStruct((*shape, on.model.num_heads, on.model.head_dim), on.compute_dtype)


def _num_cached_heads(on: KindOnMesh) -> int:
    """Key/value heads in the cache: repeated if the tensor axis is larger."""
    return max(on.model.num_kv_heads, on.mesh.shape[TENSOR])


def _kv_spec(window: int | None) -> PartitionSpec:
    """The sharding of the arrays of `KV`, for layers with this window."""
    return PartitionSpec(BATCH_AXES, None, None if window else CONTEXT, TENSOR, None)


class KV(NamedTuple):
    """Keys and values of some layers that have the same place in the period of layer kinds.

    [B, layers, tokens, K, H]; K is repeated to the size of the tensor axis if that is larger. Layers that attend to all
    earlier tokens shard the tokens over context.
    """

    k: jax.Array
    v: jax.Array


def _qk_norm(model: ModelConfig, **heads: int) -> RMSNorm | None:
    """The norm of queries or keys; `heads` has the name and size of the dimension of heads."""
    if model.qk_norm == "none":
        return None
    dims = {"norm": model.head_dim} if model.qk_norm == "head" else {**heads, "norm": model.head_dim}
    return RMSNorm(epsilon=model.norm_epsilon, zero_centered=model.zero_centered_norm, **dims)


class AttentionLayer(TiledLayer):
    """A layer with attention: only x, K and V exist at full sequence length.

    forward    for each tile: K and V
               for each tile: queries, attention to all K and V, and the rest of the layer; y overwrites x
    backward   for each tile: recompute K and V
               for each tile: recompute queries, and attention unless it was saved; gradients of x, of the weights,
                              and of all K and V that the tile attends to; dx overwrites dy
               for each tile: add the gradients that its dK and dV give to dx and to the weights
    """

    attention: TiledAttention

    def forward(self, weights, x_nBtD, positions_nBt, ranges, prefetch):
        attention = self.attention
        kv = self._keys_values(weights, x_nBtD, positions_nBt, ranges)

        def run_tile(x_nBtD, operands):
            tile, positions_Bt = operands
            x_BtD = at(x_nBtD, tile)
            q_BtNH, gate_BtNH, sinks_N = self._queries(weights, x_BtD, positions_Bt)
            results = attention.forward(q_BtNH, kv, tile, ranges, sinks_N)
            (y_BtD, sums), chosen_Btk = self.after_attention(weights, x_BtD, results[0], gate_BtNH, positions_Bt)
            return put_at(x_nBtD, y_BtD, tile), (results if self.saves_attention else None, sums, chosen_Btk)

        output, saved, chosen_nBtk, next_weights = self.scan_tiles(run_tile, x_nBtD, (positions_nBt,), prefetch)
        return (output, next_weights), (weights, x_nBtD, positions_nBt, ranges, saved, chosen_nBtk, prefetch)

    def backward(self, residuals, gradients):
        weights, x_nBtD, positions_nBt, ranges, saved, chosen_nBtk, prefetch = residuals
        (dy_nBtD, dsums), _ = gradients
        attention, trainable, all_of = self.attention, weights.trainable, weights.with_trainable
        # The barrier makes this layer wait for dy; otherwise its arrays and those of the next layer would be live at
        # the same time.
        x_nBtD, dy_nBtD, zero = lax.optimization_barrier((x_nBtD, dy_nBtD, jnp.float32(0)))
        kv = self._keys_values(weights, x_nBtD, positions_nBt, ranges)

        def tile_backward(carry, operands):
            dx_nBtD, dkv, dweights = carry
            tile, x_BtD, positions_Bt, saved, chosen_Btk = operands
            (q_BtNH, gate_BtNH, sinks_N), queries_vjp = jax.vjp(
                lambda w, x: self._queries(all_of(w), x, positions_Bt), trainable, x_BtD
            )
            results = saved or attention.forward(q_BtNH, kv, tile, ranges, sinks_N)
            _, rest_vjp = jax.vjp(
                lambda w, *x: self.after_attention(all_of(w), *x, positions_Bt, chosen_Btk)[0],
                *(trainable, x_BtD, results[0], gate_BtNH),
            )
            dweights_rest, dx_rest, dout_BtNH, dgate_BtNH = rest_vjp(LayerOutput(at(dx_nBtD, tile), dsums))
            dq_BtNH, dkv, dsinks_N = attention.backward(q_BtNH, kv, dkv, tile, *results, dout_BtNH, ranges, sinks_N)
            dweights_queries, dx_queries = queries_vjp((dq_BtNH.astype(q_BtNH.dtype), dgate_BtNH, dsinks_N))
            dweights = add(add(dweights, dweights_rest), dweights_queries)
            return (put_at(dx_nBtD, dx_rest + dx_queries, tile), dkv, dweights), None

        def keys_values_backward(carry, operands):
            dx_nBtD, dweights = carry
            tile, x_BtD, positions_Bt = operands
            k_v, keys_values_vjp = jax.vjp(
                lambda w, x: self._tile_keys_values(all_of(w), x, positions_Bt), trainable, x_BtD
            )
            dk_dv = jax.tree.map(lambda d, like: d.astype(like.dtype), attention.take(dkv, tile), k_v)
            dweights_tile, dx_BtD = keys_values_vjp(dk_dv)
            return (put_at(dx_nBtD, at(dx_nBtD, tile) + dx_BtD, tile), add(dweights, dweights_tile)), None

        tiles = tile_indices(x_nBtD)
        dweights = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trainable)
        carry = dy_nBtD, jnp.zeros(kv.shape, jnp.float32) + zero, dweights
        carry, _ = lax.scan(tile_backward, carry, (tiles, x_nBtD, positions_nBt, saved, chosen_nBtk))
        if prefetch is not None:
            carry, next_weights = schedule_after(carry, prefetch.in_backward)
            prefetch = Prefetch(None, next_weights)
        dx_nBtD, dkv, dweights = carry
        dkv = attention.add_exchanged(dkv, ranges)
        carry, _ = lax.scan(keys_values_backward, (dx_nBtD, dweights), (tiles, x_nBtD, positions_nBt))
        dx_nBtD, dweights = carry
        dweights = jax.tree.map(lambda d, w: d.astype(w.dtype), dweights, trainable)
        return LayerParams(dweights, None), dx_nBtD, None, None, prefetch

    def _keys_values(self, weights, x_nBtD, positions_nBt, ranges) -> jax.Array:
        """K and V of all tokens, in the layout of the tile attention, after its exchange."""
        attention = self.attention
        abstract_tile = jax.eval_shape(self._tile_keys_values, weights, x_nBtD[0], positions_nBt[0])

        def put(kv, operands):
            tile, x_BtD, positions_Bt = operands
            return attention.put(kv, *self._tile_keys_values(weights, x_BtD, positions_Bt), tile), None

        batch, tile_tokens, _, head_dim = abstract_tile[0].shape
        empty = attention.empty(batch, len(x_nBtD) * tile_tokens, head_dim, x_nBtD.dtype)
        # The zeros depend on x, so that they are not allocated before it.
        x_nBtD, zero = lax.optimization_barrier((x_nBtD, jnp.zeros((), empty.dtype)))
        kv, _ = lax.scan(put, empty + zero, (tile_indices(x_nBtD), x_nBtD, positions_nBt))
        return attention.exchange(kv, ranges)

    def _tile_keys_values(self, weights, x_BtD, positions_Bt):
        layer = self.layer(weights)
        input_BtD = layer.attention_input(x_BtD, shard=self.shard)
        return layer.attention.keys_values(input_BtD, Rotation(positions_Bt, self.tables), shard=self.shard)

    def _queries(self, weights, x_BtD, positions_Bt):
        """(q_BtNH, gate_BtNH or None, sinks_N or None)"""
        layer = self.layer(weights)
        input_BtD = layer.attention_input(x_BtD, shard=self.shard)
        queries = layer.attention.queries(input_BtD, Rotation(positions_Bt, self.tables), shard=self.shard)
        return *queries, layer.attention.sinks_N


_MIN_ROWS = 16  # the smallest query block of a kernel
_NUM_PROGRAMS = 256  # about two per multiprocessor of an H100
_MIN_PART_KEYS = 512
_KV_BLOCK = 128  # parts are whole blocks of a kernel
_BLOCK_KEYS = 1024


def attend_one(
    kernel: Kernel,
    q_B1NH: jax.Array,
    k_BLSKH: jax.Array,
    v_BLSKH: jax.Array,
    layer: jax.Array,
    num_keys_B: jax.Array,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query per sequence over a layer of the KV cache, which is read in place.

    On a GPU, the query heads that share a key/value head become rows of one query block, so that each key is read once.
    The keys are split into parts, which are computed in parallel and merged by their log-sum-exp (Flash-Decoding, Dao
    et al. 2023, pytorch.org/blog/flash-decoding). Each part is a query block with its own key range. Kernels that
    cannot read a layer in place get its keys and values in short blocks, one after the other.

    Args:
      kernel: supports any key ranges.
      spec: not causal.
    Returns:
      (out_B1NH, lse_BN1) over the first num_keys_B keys of layer `layer`, float32; without keys 0 and -inf.
    """
    (batch, _, num_heads, width), num_kv_heads = q_B1NH.shape, k_BLSKH.shape[3]
    q_BGKH = q_B1NH.reshape(batch, num_kv_heads, -1, width).swapaxes(1, 2)
    # A cache of another dtype is cast block by block.
    in_place = hasattr(kernel, "forward_in_layer") and k_BLSKH.dtype == q_B1NH.dtype
    attend = _in_parts if in_place else _in_blocks
    out_BGKH, lse_BKG = attend(kernel, q_BGKH, k_BLSKH, v_BLSKH, layer, num_keys_B, spec)
    return out_BGKH.swapaxes(1, 2).reshape(batch, 1, num_heads, -1), lse_BKG.reshape(batch, num_heads, 1)


def _in_parts(kernel, q_BGKH, k_BLSKH, v_BLSKH, layer, num_keys_B, spec):
    (batch, groups, num_kv_heads, _), max_keys = q_BGKH.shape, k_BLSKH.shape[2]
    num_rows = max(_MIN_ROWS, 1 << (groups - 1).bit_length())
    num_parts = max(1, min(_NUM_PROGRAMS // (batch * num_kv_heads), max_keys // _MIN_PART_KEYS))
    part_keys = -(-max_keys // (num_parts * _KV_BLOCK)) * _KV_BLOCK
    first_P = part_keys * jnp.arange(num_parts, dtype=jnp.int32)
    end_BP = jnp.minimum(first_P + part_keys, num_keys_B[:, None])
    ranges = KeyRanges(jnp.minimum(first_P, end_BP), end_BP)
    q_BRKH = jnp.pad(q_BGKH, ((0, 0), (0, num_rows - groups), (0, 0), (0, 0)))
    spec = dataclasses.replace(spec, query_block_tokens=num_rows)
    out, lse = kernel.forward_in_layer(jnp.tile(q_BRKH, (1, num_parts, 1, 1)), k_BLSKH, v_BLSKH, layer, ranges, spec)
    out_BPRKH = out.reshape(batch, num_parts, num_rows, num_kv_heads, -1)
    lse_BKPR = lse.reshape(batch, num_kv_heads, num_parts, num_rows)
    return merge_parts(jnp.moveaxis(out_BPRKH, 1, 0)[:, :, :groups], jnp.moveaxis(lse_BKPR, 2, 0)[..., :groups])


def _in_blocks(kernel, q_BGKH, k_BLSKH, v_BLSKH, layer, num_keys_B, spec):
    (batch, groups, num_kv_heads, _), max_keys = q_BGKH.shape, k_BLSKH.shape[2]
    block = min(_BLOCK_KEYS, max_keys)
    ends_BG = jnp.broadcast_to(num_keys_B[:, None], (batch, groups))

    def add_block(index, out_lse):
        first = jnp.minimum(index * block, max_keys - block)  # the last block may overlap with the one before it
        k, v = (
            lax.dynamic_slice(x, (0, layer, first, 0, 0), (batch, 1, block, *x.shape[3:]))[:, 0].astype(q_BGKH.dtype)
            for x in (k_BLSKH, v_BLSKH)
        )
        ranges = KeyRanges(jnp.full_like(ends_BG, index * block), ends_BG).within(first, block)
        out, lse = kernel.forward(q_BGKH, k, v, ranges, spec)
        return merge(*out_lse, out.astype(jnp.float32), lse)

    none = (
        jnp.zeros((*q_BGKH.shape[:3], v_BLSKH.shape[-1]), jnp.float32),
        jnp.full((batch, num_kv_heads, groups), -jnp.inf),
    )
    return lax.fori_loop(0, (num_keys_B.max() + block - 1) // block, add_block, none)


_TOKENS, _BATCH = PartitionSpec(BATCH_AXES, CONTEXT, TENSOR, None), PartitionSpec(BATCH_AXES)
_LSE = PartitionSpec(BATCH_AXES, TENSOR, CONTEXT)
_PER_RANK = PartitionSpec((*BATCH_AXES, CONTEXT))  # arrays that differ between the ranks that share sequences


@dataclass(frozen=True, kw_only=True)
class CachedAttention(CachedKernels):
    """Attention of new tokens over the KV cache, context parallel, and the update of the cache; under `jit`.

    A chunk of a prompt attends in two parts that are merged by their log-sum-exp:

        tokens of the chunk    causal, with the strategy and kernel of training, since padding comes last
        tokens in the cache    all queries of a sequence attend to all of them. Each rank computes the queries of the
                               whole chunk against the keys that it stores. Queries and results are exchanged, which
                               are much smaller than the cache ("pass-Q", Yang et al. 2024, arXiv:2411.01783).

    In sliding layers each rank computes its own queries against the last tokens and those of the chunk, in one call. In
    a decoding step, each rank computes the one query of each sequence against the keys that it stores.
    """

    config: AttentionConfig
    mesh: Mesh
    layout: CacheLayout
    window: int | None  # tokens that a query of a sliding layer attends to. None: all earlier tokens
    q_like: jax.ShapeDtypeStruct  # q_BCNH of all calls
    num_kv_heads: int

    def bind(self, new: NewTokens) -> Callable:
        """See `contract.Cached`. All layers share the key ranges over the tokens in the cache."""
        return functools.partial(self, new=new, ranges=self._ranges(new))

    def _ranges(self, new: NewTokens) -> Any:
        if self.window or self._is_decoding:
            return None

        def local(new: NewTokens):
            num_keys_b = self.layout.num_stored(lax.axis_index(CONTEXT), new.num_past_B)
            end_bC = jnp.where(new.is_new_BC(self.q_like.shape[1]), num_keys_b[:, None], 0)
            ranges = KeyRanges(jnp.zeros_like(end_bC), end_bC)
            return prepared(self._cache_kernel.kernel, ranges, self.layout.tokens_per_rank, self._spec)

        with jax.named_scope(scopes.CORE_ATTENTION):
            return self._split(local, (NewTokens(_BATCH, _BATCH),), _PER_RANK)(new)

    def __call__(
        self,
        q_BCNH: jax.Array,
        k_BCKH: jax.Array,
        v_BCKH: jax.Array,
        sinks_N: jax.Array | None = None,
        *,
        cache: KV,
        layer: jax.Array,
        new: NewTokens,
        ranges: Any,
    ) -> tuple[jax.Array, KV]:
        """Appends the keys and values of the new tokens to layer `layer` of `cache`, and attends.

        Args:
          q_BCNH, k_BCKH, v_BCKH: of a chunk of C tokens, a multiple of the context axis, which splits C.
          sinks_N: float32; see attention/contract.py. None: no sinks.
          layer: index into the second dimension of `cache`, int32.
          ranges: of `_ranges`.
        Returns:
          out_BCNH in the dtype of q; padding has any value. The cache with the new tokens.
        """
        k_BCKH, v_BCKH = (repeat_heads(x, self.mesh.shape[TENSOR]) for x in (k_BCKH, v_BCKH))
        local = self._decode if self._is_decoding else self._attend_window if self.window else self._attend_past
        cache_spec = _kv_spec(self.window)
        caches = KV(cache_spec, cache_spec)
        in_specs = (_TOKENS, _TOKENS, _TOKENS, caches, PartitionSpec(), NewTokens(_BATCH, _BATCH), _PER_RANK)
        split = self._split(local, in_specs, (_TOKENS, _LSE, caches))
        window_scope = jax.named_scope(scopes.SLIDING_WINDOW) if self.window else nullcontext()
        with jax.named_scope(scopes.CORE_ATTENTION), window_scope, jax.named_scope(scopes.KV_CACHE):
            out_BCNH, lse_BNC, cache = split(q_BCNH, k_BCKH, v_BCKH, cache, layer, new, ranges)
        if not (self.window or self._is_decoding):
            out, lse = self._chunk_attention(q_BCNH, k_BCKH, v_BCKH)
            with jax.named_scope(scopes.CORE_ATTENTION):
                out_BCNH, lse_BNC = merge(out_BCNH, lse_BNC, out.astype(jnp.float32), lse)
        with jax.named_scope(scopes.CORE_ATTENTION):
            out_BCNH, _ = contract.join(out_BCNH, lse_BNC, sinks_N)  # once: out and lse are over all keys here
        return out_BCNH.astype(q_BCNH.dtype), cache

    @property
    def kernels(self) -> dict[str, KernelSelection]:
        past = {"tokens in the cache": self._cache_kernel}
        return past if self.window or self._is_decoding else {"tokens of the chunk": self._chunk_kernel} | past

    @property
    def _is_decoding(self) -> bool:
        return self.q_like.shape[1] == decode_tokens(self.mesh)

    @property
    def _spec(self) -> AttentionSpec:
        return sharded_attention.attention_spec(self.config, causal=False, window=None, scale=None)

    @property
    def _chunk_config(self) -> AttentionConfig:
        """The config of a call within a chunk, with kernel auto if the named one does not support this device."""
        try:
            self._choose(self.config)
        except Unsupported:
            return dataclasses.replace(self.config, kernel="auto")
        return self.config

    @property
    def _chunk_kernel(self) -> KernelSelection:
        return self._choose(self._chunk_config)

    def _choose(self, config: AttentionConfig) -> KernelSelection:
        head_dim, dtype = self.q_like.shape[-1], self.q_like.dtype
        return sharded_attention.choose(config, self.mesh, head_dim=head_dim, dtype=dtype, packed=False)

    @property
    def _chunk_attention(self) -> sharded_attention.ShardedAttention:
        return sharded_attention.make(self._chunk_config, self.mesh, token_order="natural")

    @property
    def _cache_kernel(self) -> KernelSelection:
        """The kernel of calls over the cache; `auto` if the named one does not support their ranges.

        A chunk of full layers has the form of packed documents: all queries of a sequence have the same keys.
        """
        device = self.mesh.devices.flat[0]
        batch, chunk_tokens, num_heads, head_dim = self.q_like.shape
        num_rows = max(chunk_tokens * num_heads, self.layout.tokens_per_rank * self.num_kv_heads)
        batch_ranks = math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)
        problem = AttentionProblem(
            platform=device.platform,
            compute_capability=getattr(device, "compute_capability", None),
            dtype=jnp.dtype(self.q_like.dtype).name,
            head_dim=head_dim,
            value_dim=head_dim,
            window=self.window,
            implicit_positions=False,
            document_ranges=not (self.window or self._is_decoding),
            num_elements=num_rows * head_dim * batch // (batch_ranks * self.mesh.shape[TENSOR]),
            cudnn_version=cudnn.version_for(device),
        )
        name = self.config.kernel
        is_supported = name in KERNELS and KERNELS[name].unsupported(problem) is None
        return choose_kernel(name if is_supported else "auto", problem)

    def _split(self, local, in_specs: tuple, out_specs):
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    # The methods below run inside `shard_map`. They return (out_bcnH float32, lse_bnc, cache).

    def _attend_past(self, q_bcnH, k_bckH, v_bckH, cache: KV, layer: jax.Array, new: NewTokens, ranges):
        """Attention of a chunk to the tokens in the cache, without those of the chunk."""
        q_bCnH, k_bCkH, v_bCkH = map(_gathered, (q_bcnH, k_bckH, v_bckH))
        cache = self._store(cache, layer, new, k_bCkH, v_bCkH)
        k_bskH, v_bskH = (lax.dynamic_index_in_dim(x, layer, 1, keepdims=False).astype(q_bCnH.dtype) for x in cache)
        out_bCnH, lse_bnC = self._cache_kernel.kernel.forward(q_bCnH, k_bskH, v_bskH, ranges, self._spec)
        # [ranks, ...] for the queries of this rank
        out_bRcnH = out_bCnH.reshape(len(out_bCnH), -1, *q_bcnH.shape[1:])
        lse_bnRc = lse_bnC.reshape(*lse_bnC.shape[:2], -1, q_bcnH.shape[1])
        out_RbcnH, lse_Rbnc = lax.all_to_all(out_bRcnH, CONTEXT, 1, 0), lax.all_to_all(lse_bnRc, CONTEXT, 2, 0)
        return *merge_parts(out_RbcnH.astype(jnp.float32), lse_Rbnc), cache

    def _attend_window(self, q_bcnH, k_bckH, v_bckH, cache: KV, layer: jax.Array, new: NewTokens, ranges):
        """Attention of a chunk to the last tokens, whether they are in the cache or in the chunk."""
        (batch, c), window = q_bcnH.shape[:2], self.window
        chunk = tuple(map(_gathered, (k_bckH, v_bckH)))
        # Key s is the token num_past - window + s.
        slots_bw = (new.num_past_B[:, None] + jnp.arange(window, dtype=jnp.int32)) % window
        past = [x[jnp.arange(batch)[:, None], layer, slots_bw] for x in cache]
        past, cache = lax.optimization_barrier((past, cache))  # XLA would copy a cache that is read after the update
        cache = self._store(cache, layer, new, *chunk)
        k_bSkH, v_bSkH = (jnp.concatenate([old.astype(x.dtype), x], 1) for old, x in zip(past, chunk, strict=True))

        index_c = lax.axis_index(CONTEXT) * c + jnp.arange(c, dtype=jnp.int32)
        is_new_bc = index_c < new.num_new_B[:, None]
        end_bc = jnp.broadcast_to(index_c + window + 1, (batch, c))
        start_bc = jnp.maximum(end_bc - window, window - new.num_past_B[:, None])
        ranges = KeyRanges(*(jnp.where(is_new_bc, x, 0) for x in (start_bc, end_bc)))
        out_bcnH, lse_bnc = self._cache_kernel.kernel.forward(q_bcnH, k_bSkH, v_bSkH, ranges, self._spec)
        return out_bcnH.astype(jnp.float32), lse_bnc, cache

    def _decode(self, q_bcnH, k_bckH, v_bckH, cache: KV, layer: jax.Array, new: NewTokens, ranges):
        """Attention of the first query, which is repeated, to the tokens in the cache and itself."""
        q_bCnH, k_bCkH, v_bCkH = map(_gathered, (q_bcnH, k_bckH, v_bckH))
        cache = self._store(cache, layer, new, k_bCkH, v_bCkH)
        num_tokens_b = new.num_past_B + new.num_new_B
        if self.window:  # all context ranks have the same tokens, in any order
            num_keys_b = jnp.minimum(num_tokens_b, self.window)
        else:
            num_keys_b = self.layout.num_stored(lax.axis_index(CONTEXT), num_tokens_b)
        results = attend_one(self._cache_kernel.kernel, q_bCnH[:, :1], *cache, layer, num_keys_b, self._spec)
        if not self.window:
            results = merge_parts(*(lax.all_gather(x, CONTEXT) for x in results))
        out_b1nH, lse_bn1 = results
        out_bcnH = jnp.broadcast_to(out_b1nH, q_bcnH.shape)
        return out_bcnH, jnp.broadcast_to(lse_bn1, (*lse_bn1.shape[:2], q_bcnH.shape[1])), cache

    def _store(self, cache: KV, layer: jax.Array, new: NewTokens, k_bCkH: jax.Array, v_bCkH: jax.Array) -> KV:
        """The cache with the new tokens that this rank stores."""
        chunk_tokens = k_bCkH.shape[1]
        positions_bC, is_stored_bC = new.positions_BC(chunk_tokens), new.is_new_BC(chunk_tokens)
        if self.window:
            is_stored_bC &= jnp.arange(chunk_tokens) >= new.num_new_B[:, None] - self.window
            slots_bC = positions_bC % self.window
        else:
            rank = lax.axis_index(CONTEXT)
            is_stored_bC &= self.layout.is_stored_on(rank, positions_bC)
            slots_bC = self.layout.num_stored(rank, positions_bC)
        slots_bC = jnp.where(is_stored_bC, slots_bC, cache.k.shape[2])  # others are dropped
        sequences_b1 = jnp.arange(len(slots_bC))[:, None]
        return KV(*(
            stored.at[sequences_b1, layer, slots_bC].set(x.astype(stored.dtype), mode="drop")
            for stored, x in zip(cache, (k_bCkH, v_bCkH), strict=True)
        ))  # fmt: skip


def _gathered(x_bcnH: jax.Array) -> jax.Array:
    """The tokens of all context ranks."""
    return lax.all_gather(x_bcnH, CONTEXT, axis=1, tiled=True)
