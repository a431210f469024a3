"""Gated DeltaNet: linear attention with a recurrent state (Yang et al. 2024, "Gated Delta
Networks"), as in Qwen 3.5.

G key heads of dimension K serve H value heads of dimension V. Queries, keys and values pass a short
causal convolution and SiLU, queries and keys are then scaled to length 1. The state decays by
exp(-exp(log_decay) softplus(x wa + decay_bias)) per token, and sigmoid(x wb) is the step size of
its correction; twice that if the state may change its sign (`model.delta_net.negative_eigenvalues`;
Grazzi et al. 2024, arXiv:2411.12537). The output is normed per head and multiplied by silu(x wz).

What crosses ranks is in `jaxlc.attention.delta_rule`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.attention.delta_rule.chunk_rule import Tokens, one_output
from jaxlc.attention.delta_rule.sharded_delta_net import (
    FILTERS,
    HEADS,
    ShardedDeltaNet,
    filtered,
    unit_length,
)
from jaxlc.attention.delta_rule.sharded_rule import continued_delta_rule
from jaxlc.attention.delta_rule.tiled_delta_net import TiledDeltaNet
from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.config.kinds import MIXERS, mixer_matrices
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.models.block import InitKeys, RMSNorm, matrix, residual_depth_scale, rms_norm, weight
from jaxlc.models.contract import (
    BatchTokens,
    CacheLayout,
    KindOnMesh,
    Mixer,
    NewTokens,
    OnTiles,
    OnTrees,
    PerDocumentOrder,
    ReadsBefore,
    Sequences,
    Tiles,
    decode_tokens,
)
from jaxlc.models.layer_tiles import RecurrentLayer
from jaxlc.models.matmuls import Fp8, in_use
from jaxlc.sharding.mesh import Ranks
from jaxlc.sharding.rules import Sharder

# Initial decay: A uniform in the first range, step sizes log-uniform in the second (Mamba-2, Dao
# and Gu 2024).
_DECAYS, _STEP_SIZES = (1.0, 16.0), (1e-3, 0.1)


class GatedDeltaNet(Mixer, OnTiles, OnTrees, PerDocumentOrder, ReadsBefore):
    """See the top of the file. Gates and states are float32."""

    def __init__(
        self,
        model: ModelConfig,
        keys: InitKeys,
        fp8: Fp8 | None = None,
        lora: LoraConfig | None = None,
    ):
        super().__init__(model, keys, fp8, lora, tuple(MIXERS["gated_delta_net"].projections))
        weights, num_taps, num_heads = (
            mixer_matrices(model),
            model.delta_net.conv_taps,
            model.delta_net.value_heads,
        )
        self.wq, self.wk, self.wv = (weight(keys, weights[name]) for name in ("wq", "wk", "wv"))
        self.wz, self.wb, self.wa = (weight(keys, weights[name]) for name in ("wz", "wb", "wa"))
        self.wo = weight(keys, weights["wo"], residual_depth_scale(model))
        self.conv_q, self.conv_k, self.conv_v = (
            matrix(keys, fan_in=num_taps, taps=num_taps, **weights[name].outputs)
            for name in ("wq", "wk", "wv")
        )
        decay = jax.random.uniform(
            keys.params(), (num_heads,), minval=_DECAYS[0], maxval=_DECAYS[1]
        )
        logs = [math.log(size) for size in _STEP_SIZES]
        step_size = jnp.exp(
            jax.random.uniform(keys.params(), (num_heads,), minval=logs[0], maxval=logs[1])
        )
        self.log_decay = nnx.Param(jnp.log(decay), dims=("decay",))
        # the inverse of softplus
        self.decay_bias = nnx.Param(jnp.log(jnp.expm1(step_size)), dims=("decay",))
        self.out_norm = RMSNorm(
            epsilon=model.delta_net.norm_epsilon or model.norm_epsilon,
            norm=model.delta_net.value_dim,
        )
        self.largest_step = 2.0 if model.delta_net.negative_eigenvalues else 1.0

    @jax.named_scope(scopes.ATTENTION)
    def operands(self, x_BTD: jax.Array, *, shard: Sharder) -> tuple[tuple, jax.Array]:
        """Returns the operands of `jaxlc.attention.delta_rule.sharded_delta_net.ShardedDeltaNet`,
        and the z_BTHV of `projected`. `x_BTD` is the input of the block, gathered over tensor."""
        q_BTGK = shard.heads(self.project("query", "BTD,DGK->BTGK", x_BTD, self.wq, shard=shard))
        k_BTGK = shard.heads(self.project("key", "BTD,DGK->BTGK", x_BTD, self.wk, shard=shard))
        v_BTHV = shard.heads(self.project("value", "BTD,DHV->BTHV", x_BTD, self.wv, shard=shard))
        z_BTHV = shard.heads(
            self.project("delta_gate", "BTD,DHV->BTHV", x_BTD, self.wz, shard=shard)
        )
        a_BTH, b_BTH = (
            shard.ffn(self.project(name, "BTD,DH->BTH", x_BTD, w, shard=shard)).astype(jnp.float32)
            for name, w in (("delta_decay", self.wa), ("delta_step", self.wb))
        )
        g_BTH = -jnp.exp(self.log_decay[...]) * jax.nn.softplus(a_BTH + self.decay_bias[...])
        filters = (in_use(w, shard, jnp.float32) for w in (self.conv_q, self.conv_k, self.conv_v))
        qkv = (
            checkpoint_name(q_BTGK, "query"),
            checkpoint_name(k_BTGK, "key"),
            checkpoint_name(v_BTHV, "value"),
        )
        return (*qkv, g_BTH, self.largest_step * jax.nn.sigmoid(b_BTH), *filters), checkpoint_name(
            z_BTHV, "query"
        )

    @jax.named_scope(scopes.ATTENTION)
    def projected(self, out_BTHV: jax.Array, z_BTHV: jax.Array, *, shard: Sharder) -> jax.Array:
        """The output projection of the normed and gated output, out_BTD."""
        out_BTHV, z_BTHV = shard.heads(out_BTHV), shard.heads(z_BTHV)
        normed_BTHV = rms_norm(
            out_BTHV.astype(jnp.float32), self.out_norm.factor, self.out_norm.epsilon
        )
        gated_BTHV = (normed_BTHV * jax.nn.silu(z_BTHV.astype(jnp.float32))).astype(out_BTHV.dtype)
        out_BTD = self.project(
            "attention_projected", "BTHV,HVD->BTD", gated_BTHV, self.wo, shard=shard
        )
        return checkpoint_name(shard.residual(out_BTD), "attention_projected")

    @classmethod
    def on_sequences(cls, on: KindOnMesh) -> Sequences:
        sharded = ShardedDeltaNet(on.mesh, on.num_chains, on.model.delta_net.conv_taps)

        def prepare(tokens: BatchTokens):
            return sharded.prepare(tokens.segments_BT, tokens.prefixes_BT, tokens.fragments_BT)

        return Sequences(prepare, sharded)

    @classmethod
    def on_tiles(cls, on: KindOnMesh) -> Tiles:
        tiled = TiledDeltaNet(on.mesh, on.num_tiles, on.model.delta_net.conv_taps)

        def prepare(tokens: BatchTokens):
            is_one_segment = tokens.segments_BT is None
            return tiled.prepare(
                jnp.ones_like(tokens.positions_BT) if is_one_segment else tokens.segments_BT
            )

        return Tiles(prepare, RecurrentLayer, tiled)

    @classmethod
    def reach(cls, model: ModelConfig) -> int:
        return model.delta_net.conv_taps - 1

    @classmethod
    def abstract_cache(
        cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, num_layers: int, dtype
    ) -> "DeltaStates":
        model = on.model
        key, value = (
            (model.delta_net.key_heads, model.delta_net.key_dim),
            (model.delta_net.value_heads, model.delta_net.value_dim),
        )

        def array(spec: PartitionSpec, dtype, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                (batch_size, num_layers, *shape), dtype, sharding=NamedSharding(on.mesh, spec)
            )

        past = functools.partial(array, _PAST, dtype, cls.reach(model))
        state = array(_STATE, jnp.float32, value[0], key[1], value[1])
        return DeltaStates(state, past(*key), past(*key), past(*value))

    @classmethod
    def cached(
        cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, chunk_tokens: int
    ) -> "CachedDeltaNet":
        return CachedDeltaNet(mesh=on.mesh, chunk_tokens=chunk_tokens)


class DeltaStates(NamedTuple):
    """What some layers that have the same place in the period remember: on all context ranks."""

    state: jax.Array  # float32 [B, layers, H, K, V]
    # The inputs of the convolutions of the last P - 1 tokens: [B, layers, P - 1, G, K] and [B,
    # layers, P - 1, H, V].
    past_q: jax.Array
    past_k: jax.Array
    past_v: jax.Array


_STATE = PartitionSpec(BATCH_AXES, None, TENSOR)
_PAST = PartitionSpec(BATCH_AXES, None, None, TENSOR)
_BATCH = PartitionSpec(BATCH_AXES)


@dataclass(frozen=True, kw_only=True)
class CachedDeltaNet:
    """A chunk of new tokens, from the state after the tokens before it, context parallel; under
    `jit`.

    A chunk of a prompt is split over the context ranks, which exchange the maps of their states as
    in training. The state after it is on all context ranks. In a decoding step they all compute the
    same token.
    """

    mesh: Mesh
    chunk_tokens: int  # of all calls

    def bind(self, new: NewTokens) -> Callable:
        """See `contract.Cached`."""
        return functools.partial(self, new=new)

    def __call__(self, *operands: jax.Array, cache: DeltaStates, layer: jax.Array, new: NewTokens):
        """The outputs out_BCHV, those of padding of any value, and the cache with the states of
        layer `layer` after the new tokens.

        Args:
          operands: those of `ShardedDeltaNet`, of a chunk that the context axis splits.
        """
        states = DeltaStates(_STATE, _PAST, _PAST, _PAST)
        operand_specs = (*[HEADS] * 5, *[FILTERS] * 3)
        in_specs = (operand_specs, states, PartitionSpec(), NewTokens(_BATCH, _BATCH))
        is_decoding = self.chunk_tokens == decode_tokens(self.mesh)
        split = jax.shard_map(
            self._decode if is_decoding else self._prefill,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=(HEADS, states),
            check_vma=False,  # as in `ShardedDeltaNet`
        )
        return split(operands, cache, layer, new)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(CONTEXT, self.mesh.shape[CONTEXT])

    # The methods below run inside `shard_map`.

    def _prefill(self, operands: tuple, cache: DeltaStates, layer, new: NewTokens):
        q, k, v, g, beta, *filters = operands
        state, *past = (lax.dynamic_index_in_dim(x, layer, 1, keepdims=False) for x in cache)
        first = lax.axis_index(CONTEXT) * q.shape[1]
        is_new = (first + jnp.arange(q.shape[1]) < new.num_new_B[:, None])[..., None]
        # padding does not change the state
        g, beta = jnp.where(is_new, g, 0), jnp.where(is_new, beta, 0)
        inputs = (
            filtered(
                x,
                taps,
                None,
                ranks=self._ranks,
                num_fragments=1,
                past_bPW=before.reshape(*before.shape[:2], -1),
            )
            for x, taps, before in zip((q, k, v), filters, past)
        )
        inputs = _normed(*inputs)
        out, state = continued_delta_rule(
            *inputs, g, beta, state, ranks=self._ranks, scale=q.shape[-1] ** -0.5
        )
        past = [_last_inputs(before, x, first, new) for before, x in zip(past, (q, k, v))]
        return out, _updated(cache, layer, [state, *past])

    def _decode(self, operands: tuple, cache: DeltaStates, layer, new: NewTokens):
        q, k, v, g, beta, *filters = operands
        state, *past = (lax.dynamic_index_in_dim(x, layer, 1, keepdims=False) for x in cache)
        num_local = q.shape[1]
        q, k, v, g, beta = (
            lax.all_gather(x, CONTEXT, axis=1, tiled=True)[:, :1] for x in (q, k, v, g, beta)
        )
        inputs = [
            jnp.concatenate([before.astype(x.dtype), x], axis=1)
            for before, x in zip(past, (q, k, v))
        ]
        alone = dict(ranks=Ranks(CONTEXT, 1), num_fragments=1)
        last = (filtered(x, taps, None, **alone)[:, -1:] for x, taps in zip(inputs, filters))
        out, new_state = one_output(
            Tokens(*_normed(*last), g, beta, None, None), state, q.shape[-1] ** -0.5
        )
        values = [new_state, *(x[:, 1:] for x in inputs)]
        is_new = new.num_new_B > 0
        values = [
            jnp.where(is_new.reshape(-1, *[1] * (x.ndim - 1)), x, old.astype(x.dtype))
            for x, old in zip(values, (state, *past))
        ]
        return jnp.broadcast_to(out, (len(out), num_local, *out.shape[2:])), _updated(
            cache, layer, values
        )


def _normed(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return unit_length(q), unit_length(k), v


def _last_inputs(
    past_bPhW: jax.Array, x_bthW: jax.Array, first: jax.Array, new: NewTokens
) -> jax.Array:
    """The last P - 1 tokens of the past and of the new tokens, of which this rank has those from
    `first` on.
    """
    num_past = past_bPhW.shape[1]
    # in the chunk; negative: in the past
    index_bP = new.num_new_B[:, None] - num_past + jnp.arange(num_past)
    local_bP = index_bP - first
    is_here = (local_bP >= 0) & (local_bP < x_bthW.shape[1]) & (index_bP >= 0)

    def taken(x, index_bP, is_taken_bP):
        values = jnp.take_along_axis(x, index_bP[..., None, None], axis=1, mode="clip")
        return jnp.where(is_taken_bP[..., None, None], values, 0)

    here = lax.psum(taken(x_bthW, local_bP, is_here), CONTEXT)
    return taken(past_bPhW, num_past + index_bP, index_bP < 0) + here.astype(past_bPhW.dtype)


def _updated(cache: DeltaStates, layer: jax.Array, values: list[jax.Array]) -> DeltaStates:
    return DeltaStates(*(
        lax.dynamic_update_index_in_dim(stored, x.astype(stored.dtype), layer, 1)
        for stored, x in zip(cache, values, strict=True)
    ))  # fmt: skip
