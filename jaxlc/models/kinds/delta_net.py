"""Gated DeltaNet: linear attention with a recurrent state (Yang et al. 2024, "Gated Delta Networks"), as in Qwen 3.5.

G key heads of dimension K serve H value heads of dimension V. Queries, keys and values pass a short causal convolution
and SiLU, queries and keys are then scaled to length 1. The state decays by exp(-exp(log_decay) softplus(x wa +
decay_bias)) per token, and sigmoid(x wb) is the step size of its correction; twice that if the state may change its
sign (`ModelConfig.delta_negative_eigenvalues`; Grazzi et al. 2024, arXiv:2411.12537). The output is normed per head and
multiplied by silu(x wz).

A layer of Gated DeltaNet as scans over tiles of tokens: only x and one map of states per tile are stored.

    forward    for each tile: the maps of its states
               the states that enter all tiles, with the exchange between ranks
               for each tile: the outputs of the recurrence, and the rest of the layer; y overwrites x
    backward   recompute maps and states
               for each tile: recompute the outputs, unless they were saved; gradients of x, of the weights, and of the
                              states that enter the tile; dx overwrites dy
               the gradients of the maps, with the exchange backwards
               for each tile: add the gradients that those of its maps give to dx and to the weights

The tokens that the convolutions read before a tile are projected once for all tiles, before x is overwritten. See
layer_tiles.py.

Gated DeltaNet over a chunk of new tokens, from the state after the tokens before it, context parallel.

A chunk of a prompt is split over the context ranks, which exchange the maps of their states as in training. The state
after it is on all context ranks. In a decoding step they all compute the same token.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jaxlc.attention.delta_rule.chunk_rule import Tokens, one_output
from jaxlc.attention.delta_rule.sharded_delta_net import FILTERS, HEADS, filtered, unit_length
from jaxlc.attention.delta_rule.sharded_rule import continued_delta_rule
from jaxlc.attention.delta_rule.tiled_delta_net import TiledDeltaNet
from jaxlc.attention.kernels.choose import KernelSelection
from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.config.schema import DELTA_PROJECTIONS
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT
from jaxlc.core.mixers import mixer_matrices
from jaxlc.models.block import Block, InitKeys, RMSNorm, matrix, residual_depth_scale, rms_norm, weight
from jaxlc.models.cache import PAST_SPEC, STATE_SPEC, DeltaStates, NewTokens, decode_tokens
from jaxlc.models.contract import LayerOutput, TiledLayer, add, at, put_at, tile_indices
from jaxlc.models.matmuls import Fp8, in_use
from jaxlc.models.offloaded_layers import LayerParams, Prefetch, schedule_after
from jaxlc.models.rope import RopeTables
from jaxlc.sharding.mesh import Ranks
from jaxlc.sharding.rules import Sharder

# Initial decay: A uniform in the first range, step sizes log-uniform in the second (Mamba-2, Dao and Gu 2024).
_DECAYS, _STEP_SIZES = (1.0, 16.0), (1e-3, 0.1)


class GatedDeltaNet(Block):
    """The block that mixes tokens; see the top of the file. Gates and states are float32."""

    def __init__(self, model: ModelConfig, keys: InitKeys, fp8: Fp8 | None = None, lora: LoraConfig | None = None):
        names = ("query", "key", "value", "attention_projected", *DELTA_PROJECTIONS)
        super().__init__(model, keys, fp8, lora, names)
        weights, num_taps, num_heads = mixer_matrices(model), model.delta_conv_taps, model.delta_value_heads
        self.wq, self.wk, self.wv = (weight(keys, weights[name]) for name in ("wq", "wk", "wv"))
        self.wz, self.wb, self.wa = (weight(keys, weights[name]) for name in ("wz", "wb", "wa"))
        self.wo = weight(keys, weights["wo"], residual_depth_scale(model))
        self.conv_q, self.conv_k, self.conv_v = (
            matrix(keys, fan_in=num_taps, taps=num_taps, **weights[name].outputs) for name in ("wq", "wk", "wv")
        )
        decay = jax.random.uniform(keys.params(), (num_heads,), minval=_DECAYS[0], maxval=_DECAYS[1])
        logs = [math.log(size) for size in _STEP_SIZES]
        step_size = jnp.exp(jax.random.uniform(keys.params(), (num_heads,), minval=logs[0], maxval=logs[1]))
        self.log_decay = nnx.Param(jnp.log(decay), dims=("decay",))
        self.decay_bias = nnx.Param(jnp.log(jnp.expm1(step_size)), dims=("decay",))  # the inverse of softplus
        self.out_norm = RMSNorm(epsilon=model.delta_norm_epsilon or model.norm_epsilon, norm=model.delta_value_dim)
        self.largest_step = 2.0 if model.delta_negative_eigenvalues else 1.0

    @jax.named_scope(scopes.ATTENTION)
    def operands(
        self, x_BTD: jax.Array, positions_BT: jax.Array, *, shard: Sharder, tables: RopeTables | None
    ) -> tuple[tuple, jax.Array]:
        """Returns the operands of `jaxlc.attention.delta_rule.sharded_delta_net.ShardedDeltaNet`, and the z_BTHV of
        `projected`. `x_BTD` is the input of the block, gathered over tensor."""
        del positions_BT, tables
        q_BTGK = shard.heads(self.project("query", "BTD,DGK->BTGK", x_BTD, self.wq, shard=shard))
        k_BTGK = shard.heads(self.project("key", "BTD,DGK->BTGK", x_BTD, self.wk, shard=shard))
        v_BTHV = shard.heads(self.project("value", "BTD,DHV->BTHV", x_BTD, self.wv, shard=shard))
        z_BTHV = shard.heads(self.project("delta_gate", "BTD,DHV->BTHV", x_BTD, self.wz, shard=shard))
        a_BTH, b_BTH = (
            shard.ffn(self.project(name, "BTD,DH->BTH", x_BTD, w, shard=shard)).astype(jnp.float32)
            for name, w in (("delta_decay", self.wa), ("delta_step", self.wb))
        )
        g_BTH = -jnp.exp(self.log_decay[...]) * jax.nn.softplus(a_BTH + self.decay_bias[...])
        filters = (in_use(w, shard, jnp.float32) for w in (self.conv_q, self.conv_k, self.conv_v))
        qkv = checkpoint_name(q_BTGK, "query"), checkpoint_name(k_BTGK, "key"), checkpoint_name(v_BTHV, "value")
        return (*qkv, g_BTH, self.largest_step * jax.nn.sigmoid(b_BTH), *filters), checkpoint_name(z_BTHV, "query")

    @jax.named_scope(scopes.ATTENTION)
    def projected(self, out_BTHV: jax.Array, z_BTHV: jax.Array, *, shard: Sharder) -> jax.Array:
        """The output projection of the normed and gated output, out_BTD."""
        out_BTHV, z_BTHV = shard.heads(out_BTHV), shard.heads(z_BTHV)
        normed_BTHV = rms_norm(out_BTHV.astype(jnp.float32), self.out_norm.factor, self.out_norm.epsilon)
        gated_BTHV = (normed_BTHV * jax.nn.silu(z_BTHV.astype(jnp.float32))).astype(out_BTHV.dtype)
        out_BTD = self.project("attention_projected", "BTHV,HVD->BTD", gated_BTHV, self.wo, shard=shard)
        return checkpoint_name(shard.residual(out_BTD), "attention_projected")


class DeltaNetLayer(TiledLayer):
    """A layer with Gated DeltaNet."""

    attention: TiledDeltaNet

    def forward(self, weights, x_nBtD, positions_nBt, ranges, prefetch):
        before = self._before(weights, x_nBtD)
        states = self.attention.states(self._maps(weights, x_nBtD, positions_nBt, before, ranges))

        def run_tile(x_nBtD, operands):
            tile, positions_Bt, before, segments, states = operands
            x_BtD = at(x_nBtD, tile)
            mixed, gate_BtHV = self._operands(weights, x_BtD, positions_Bt)
            out_BtHV = self.attention.outputs(mixed, before, states, segments)
            (y_BtD, sums), chosen_Btk = self.after_attention(weights, x_BtD, out_BtHV, gate_BtHV, positions_Bt)
            saved = (out_BtHV,) if self.saves_attention else None
            return put_at(x_nBtD, y_BtD, tile), (saved, sums, chosen_Btk)

        operands = positions_nBt, before, ranges, states
        output, saved, chosen_nBtk, next_weights = self.scan_tiles(run_tile, x_nBtD, operands, prefetch)
        return (output, next_weights), (weights, x_nBtD, positions_nBt, ranges, saved, chosen_nBtk, prefetch)

    def backward(self, residuals, gradients):
        weights, x_nBtD, positions_nBt, ranges, saved, chosen_nBtk, prefetch = residuals
        (dy_nBtD, dsums), _ = gradients
        trainable, all_of = weights.trainable, weights.with_trainable
        x_nBtD, dy_nBtD = lax.optimization_barrier((x_nBtD, dy_nBtD))  # as in layer_tiles.py
        before, before_vjp = jax.vjp(lambda w, x: self._before(all_of(w), x), trainable, x_nBtD)
        maps = self._maps(weights, x_nBtD, positions_nBt, before, ranges)
        states, states_vjp = jax.vjp(self.attention.states, maps)

        def tile_backward(carry, operands):
            dx_nBtD, dweights = carry
            (tile, x_BtD, positions_Bt, before, segments), states, saved, chosen_Btk = operands
            (mixed, gate_BtHV), operands_vjp = jax.vjp(
                lambda w, x: self._operands(all_of(w), x, positions_Bt), trainable, x_BtD
            )
            out_BtHV, outputs_vjp = jax.vjp(
                lambda *arrays: self.attention.outputs(*arrays, segments), mixed, before, states
            )
            _, rest_vjp = jax.vjp(
                lambda w, *x: self.after_attention(all_of(w), *x, positions_Bt, chosen_Btk)[0],
                *(trainable, x_BtD, out_BtHV if saved is None else saved[0], gate_BtHV),
            )
            dweights_rest, dx_rest, dout_BtHV, dgate_BtHV = rest_vjp(LayerOutput(at(dx_nBtD, tile), dsums))
            dmixed, dbefore, dstates = outputs_vjp(dout_BtHV)
            dweights_operands, dx_operands = operands_vjp((dmixed, dgate_BtHV))
            dweights = add(add(dweights, dweights_rest), dweights_operands)
            return (put_at(dx_nBtD, dx_rest + dx_operands, tile), dweights), (dbefore, dstates)

        def maps_backward(carry, operands):
            dx_nBtD, dweights = carry
            (tile, x_BtD, positions_Bt, before, segments), dmaps = operands
            _, maps_vjp = jax.vjp(
                lambda w, x, before: self._tile_maps(all_of(w), x, positions_Bt, before, segments),
                *(trainable, x_BtD, before),
            )
            dweights_tile, dx_BtD, dbefore = maps_vjp(dmaps)
            return (put_at(dx_nBtD, at(dx_nBtD, tile) + dx_BtD, tile), add(dweights, dweights_tile)), dbefore

        of_tiles = tile_indices(x_nBtD), x_nBtD, positions_nBt, before, ranges
        dweights = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trainable)
        carry, (dbefore, dstates) = lax.scan(tile_backward, (dy_nBtD, dweights), (of_tiles, states, saved, chosen_nBtk))
        if prefetch is not None:
            carry, next_weights = schedule_after(carry, prefetch.in_backward)
            prefetch = Prefetch(None, next_weights)
        (dmaps,) = states_vjp(dstates)
        (dx_nBtD, dweights), dbefore_maps = lax.scan(maps_backward, carry, (of_tiles, dmaps))
        dweights_before, dx_before = before_vjp(add(dbefore, dbefore_maps))
        dweights = jax.tree.map(lambda d, w: d.astype(w.dtype), add(dweights, dweights_before), trainable)
        return LayerParams(dweights, None), dx_nBtD + dx_before, None, None, prefetch

    def _before(self, weights, x_nBtD) -> tuple:
        """q, k and v of the tokens that the convolutions read before each tile, [n, B, ...]."""
        before_BtD = self.attention.tokens_before(x_nBtD)
        (q, k, v, *_), _ = self._operands(weights, before_BtD, None)
        return tuple(map(self.attention.before_tiles, (q, k, v)))

    def _maps(self, weights, x_nBtD, positions_nBt, before, ranges):
        """The maps of the states over the pieces of all tiles."""
        return lax.map(lambda tile: self._tile_maps(weights, *tile), (x_nBtD, positions_nBt, before, ranges))

    def _tile_maps(self, weights, x_BtD, positions_Bt, before, segments):
        return self.attention.maps(self._operands(weights, x_BtD, positions_Bt)[0], before, segments)

    def _operands(self, weights, x_BtD, positions_Bt):
        layer = self.layer(weights)
        input_BtD = layer.attention_input(x_BtD, shard=self.shard)
        return layer.attention.operands(input_BtD, positions_Bt, shard=self.shard, tables=self.tables)


_BATCH = PartitionSpec(BATCH_AXES)


@dataclass(frozen=True, kw_only=True)
class CachedDeltaNet:
    """The tokens of one kind of layers, and the update of its states; to be called under `jit`."""

    mesh: Mesh
    chunk_tokens: int  # of all calls

    @property
    def kernels(self) -> dict[str, KernelSelection]:
        """No kernels of attention."""
        return {}

    def prepare(self, new: NewTokens) -> Any:
        """What all layers share: nothing."""
        del new

    def __call__(self, *operands: jax.Array, cache: DeltaStates, layer: jax.Array, new: NewTokens, ranges: Any):
        """The outputs out_BCHV, those of padding of any value, and the cache with the states of layer `layer` after the
        new tokens.

        Args:
          operands: those of `ShardedDeltaNet`, of a chunk that the context axis splits.
        """
        del ranges
        states = DeltaStates(STATE_SPEC, PAST_SPEC, PAST_SPEC, PAST_SPEC)
        in_specs = (*[HEADS] * 5, *[FILTERS] * 3, states, PartitionSpec(), NewTokens(_BATCH, _BATCH))
        is_decoding = self.chunk_tokens == decode_tokens(self.mesh)
        split = jax.shard_map(
            self._decode if is_decoding else self._prefill,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=(HEADS, states),
            check_vma=False,  # as in `ShardedDeltaNet`
        )
        return split(*operands, cache, layer, new)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(CONTEXT, self.mesh.shape[CONTEXT])

    # The methods below run inside `shard_map`.

    def _prefill(self, q, k, v, g, beta, filter_q, filter_k, filter_v, cache: DeltaStates, layer, new: NewTokens):
        state, *past = (lax.dynamic_index_in_dim(x, layer, 1, keepdims=False) for x in cache)
        first = lax.axis_index(CONTEXT) * q.shape[1]
        is_new = (first + jnp.arange(q.shape[1]) < new.num_new_B[:, None])[..., None]
        g, beta = jnp.where(is_new, g, 0), jnp.where(is_new, beta, 0)  # padding does not change the state
        taps = zip((q, k, v), (filter_q, filter_k, filter_v), past)
        inputs = (
            filtered(x, taps, None, ranks=self._ranks, num_fragments=1, past_bPW=before.reshape(*before.shape[:2], -1))
            for x, taps, before in taps
        )
        inputs = _normed(*inputs)
        out, state = continued_delta_rule(*inputs, g, beta, state, ranks=self._ranks, scale=q.shape[-1] ** -0.5)
        past = [_last_inputs(before, x, first, new) for before, x in zip(past, (q, k, v))]
        return out, _updated(cache, layer, [state, *past])

    def _decode(self, q, k, v, g, beta, filter_q, filter_k, filter_v, cache: DeltaStates, layer, new: NewTokens):
        state, *past = (lax.dynamic_index_in_dim(x, layer, 1, keepdims=False) for x in cache)
        num_local = q.shape[1]
        q, k, v, g, beta = (lax.all_gather(x, CONTEXT, axis=1, tiled=True)[:, :1] for x in (q, k, v, g, beta))
        inputs = [jnp.concatenate([before.astype(x.dtype), x], axis=1) for before, x in zip(past, (q, k, v))]
        alone = dict(ranks=Ranks(CONTEXT, 1), num_fragments=1)
        last = (filtered(x, taps, None, **alone)[:, -1:] for x, taps in zip(inputs, (filter_q, filter_k, filter_v)))
        out, new_state = one_output(Tokens(*_normed(*last), g, beta, None, None), state, q.shape[-1] ** -0.5)
        values = [new_state, *(x[:, 1:] for x in inputs)]
        is_new = new.num_new_B > 0
        values = [
            jnp.where(is_new.reshape(-1, *[1] * (x.ndim - 1)), x, old.astype(x.dtype))
            for x, old in zip(values, (state, *past))
        ]
        return jnp.broadcast_to(out, (len(out), num_local, *out.shape[2:])), _updated(cache, layer, values)


def _normed(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return unit_length(q), unit_length(k), v


def _last_inputs(past_bPhW: jax.Array, x_bthW: jax.Array, first: jax.Array, new: NewTokens) -> jax.Array:
    """The last P - 1 tokens of the past and of the new tokens, of which this rank has those from `first` on."""
    num_past = past_bPhW.shape[1]
    index_bP = new.num_new_B[:, None] - num_past + jnp.arange(num_past)  # in the chunk; negative: in the past
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
