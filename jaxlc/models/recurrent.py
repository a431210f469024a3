"""What recurrent layers have in common: sizes, training on whole sequences and in tiles, and cached
generation.

A kind projects its tokens to `jaxlc.attention.recurrence.sharded_recurrence.Operands`, and names
the rule by which they change a state.
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

from jaxlc.attention.recurrence.chunks import Rule, one_output
from jaxlc.attention.recurrence.sharded_recurrence import (
    HEADS,
    Filter,
    Operands,
    ShardedRecurrence,
    filtered,
    rows_at,
    unit_lengths,
)
from jaxlc.attention.recurrence.sharded_rule import continued_recurrence
from jaxlc.attention.recurrence.tiled_recurrence import TiledRecurrence
from jaxlc.attention.state_passing import like, where
from jaxlc.config import ModelConfig
from jaxlc.config.kinds import MIXERS, mixer_matrices
from jaxlc.config.kinds.contract import RecurrentWidths
from jaxlc.core import BATCH_AXES, CONTEXT, TENSOR, scopes
from jaxlc.models.block import Init, bias_vector, matrix, rms_norm
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
from jaxlc.models.layer_tiles import RecurrentTiles
from jaxlc.models.matmuls import in_use
from jaxlc.sharding.mesh import ranks_of, shard_map
from jaxlc.sharding.rules import Sharder

# Initial decay: A uniform in the first range, step sizes log-uniform in the second (Dao and Gu
# 2024, "Transformers are SSMs").
_DECAYS, _STEP_SIZES = (1.0, 16.0), (1e-3, 0.1)


def initial_decays(
    init: Init, num_heads: int, num_channels: int = 0
) -> tuple[nnx.Param, nnx.Param]:
    """log A [H], and the bias of the step size before softplus: [H], or [H, channels]."""
    decay = jax.random.uniform(init.param_key(), (num_heads,), minval=_DECAYS[0], maxval=_DECAYS[1])
    shape = (num_heads, num_channels) if num_channels else (num_heads,)
    low, high = map(math.log, _STEP_SIZES)
    step_size = jnp.exp(jax.random.uniform(init.param_key(), shape, minval=low, maxval=high))
    # the inverse of softplus
    bias = nnx.Param(jnp.log(jnp.expm1(step_size)), dims=("decay", "head_dim")[: len(shape)])
    return nnx.Param(jnp.log(decay), dims=("decay",)), bias


def _widths(model: ModelConfig) -> RecurrentWidths:
    return MIXERS[model.mixers[0]].recurrence(model)


class RecurrentMixer(Mixer, OnTiles, OnTrees, PerDocumentOrder, ReadsBefore):
    """A mixer with a state of each head, and convolutions of queries, keys and values. Gates and
    states are float32.
    """

    gate_function = staticmethod(jax.nn.silu)

    def __init__(self, model: ModelConfig, init: Init):
        super().__init__(model, init)
        weights = mixer_matrices(model)
        widths = _widths(model)
        taps = widths.conv_taps
        channels = [weights[name].outputs for name in ("wq", "wk", "wv")]
        self.conv_q, self.conv_k, self.conv_v = (
            matrix(init, fan_in=taps, taps=taps, **dims) for dims in channels
        )
        self.bias_q, self.bias_k, self.bias_v = (
            bias_vector(widths.conv_bias, heads=dims["heads"], bias=dims["head_dim"])
            for dims in channels
        )
        self.add_own(model, init)

    def add_own(self, model: ModelConfig, init: Init) -> None:
        """Declares what a kind has besides its matrices and convolutions."""
        raise NotImplementedError

    @classmethod
    def rule(cls, on: KindOnMesh) -> Rule:
        """Of the layers of one kind."""
        uses_kernel = on.config.runtime.delta_kernel == "pallas"
        return Rule(scale=_widths(on.model).key_dim ** -0.5, uses_kernel=uses_kernel)

    @jax.named_scope(scopes.ATTENTION)
    def operands(self, x_BTD: jax.Array, *, shard: Sharder) -> tuple[Operands, jax.Array]:
        """Returns the operands, and the z_BTHV of `projected`. `x_BTD` is the input of the block,
        gathered over tensor."""
        q_k_v = [
            checkpoint_name(self.heads(name, x_BTD, shard=shard), name)
            for name in ("query", "key", "value")
        ]
        z_BTHV = self.gate(x_BTD, shard=shard)
        changes = self.changes(x_BTD, shard=shard)
        operands = Operands(*q_k_v, *changes, self.filters(shard))
        return operands, checkpoint_name(z_BTHV, "query")

    def gate(self, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """The gate of the output, [B, T, H, V]."""
        return self.heads("delta_gate", x_BTD, shard=shard)

    def changes(self, x_BTD: jax.Array, *, shard: Sharder) -> tuple:
        """How tokens change the states, and what they add to the output: the g, beta and skip of
        `Operands`.
        """
        raise NotImplementedError

    def gated(self, out_BTHV: jax.Array, gate_BTHV: jax.Array) -> jax.Array:
        """The normed output times the function of its gate, float32."""
        normed_BTHV = rms_norm(out_BTHV, self.out_norm.factor, self.out_norm.epsilon)
        return normed_BTHV * self.gate_function(gate_BTHV)

    def heads(self, name: str, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """A projection to a vector of each head, [B, T, H, V]."""
        return shard.heads(self.project(name, "BTD,DHV->BTHV", x_BTD, shard=shard))

    def numbers(self, name: str, x_BTD: jax.Array, *, shard: Sharder) -> jax.Array:
        """A projection to a number of each head, float32 [B, T, H]."""
        out_BTH = self.project(name, "BTD,DH->BTH", x_BTD, shard=shard)
        return shard.ffn(out_BTH).astype(jnp.float32)

    def filters(self, shard: Sharder) -> tuple[Filter, Filter, Filter]:
        taps = self.conv_q, self.conv_k, self.conv_v
        biases = self.bias_q, self.bias_k, self.bias_v
        return tuple(
            Filter(in_use(x, shard, jnp.float32), None if bias is None else bias[...])
            for x, bias in zip(taps, biases)
        )

    @jax.named_scope(scopes.ATTENTION)
    def projected(self, out_BTHV: jax.Array, z_BTHV: jax.Array, *, shard: Sharder) -> jax.Array:
        """The output projection of the normed and gated output, out_BTD."""
        wide = (shard.heads(x).astype(jnp.float32) for x in (out_BTHV, z_BTHV))
        gated_BTHV = self.gated(*wide).astype(out_BTHV.dtype)
        out_BTD = self.project("attention_projected", "BTHV,HVD->BTD", gated_BTHV, shard=shard)
        return checkpoint_name(shard.residual(out_BTD), "attention_projected")

    @classmethod
    def on_sequences(cls, on: KindOnMesh) -> Sequences:
        num_taps = _widths(on.model).conv_taps
        sharded = ShardedRecurrence(on.mesh, cls.rule(on), on.num_chains, num_taps)

        def prepare(tokens: BatchTokens):
            return sharded.prepare(tokens.segments_BT, tokens.prefixes_BTD, tokens.fragments_BT)

        return Sequences(prepare, sharded)

    @classmethod
    def on_tiles(cls, on: KindOnMesh) -> Tiles:
        num_taps = _widths(on.model).conv_taps
        tiled = TiledRecurrence(on.mesh, cls.rule(on), on.num_tiles, num_taps)

        def prepare(tokens: BatchTokens):
            segments_BT = tokens.segments_BT
            if segments_BT is None:
                segments_BT = jnp.ones_like(tokens.positions_BT)
            return tiled.prepare(segments_BT, tokens.prefixes_BTD)

        return Tiles(prepare, RecurrentTiles(tiled))

    @classmethod
    def reach(cls, model: ModelConfig) -> int:
        return _widths(model).conv_taps - 1

    @classmethod
    def abstract_cache(
        cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, num_layers: int, dtype
    ) -> "RecurrentCache":
        widths = _widths(on.model)

        def array(spec: PartitionSpec, dtype, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                (batch_size, num_layers, *shape), dtype, sharding=NamedSharding(on.mesh, spec)
            )

        past = functools.partial(array, _PAST, dtype, cls.reach(on.model))
        # as `Operands.split_over`
        past_key = past(max(widths.key_heads, on.mesh.shape[TENSOR]), widths.key_dim)
        past_value = past(widths.value_heads, widths.value_dim)
        state = array(_STATE, jnp.float32, widths.value_heads, widths.key_dim, widths.value_dim)
        return RecurrentCache(state, past_key, past_key, past_value)

    @classmethod
    def cached(
        cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, chunk_tokens: int
    ) -> "CachedRecurrence":
        rule = cls.rule(on)
        return CachedRecurrence(mesh=on.mesh, rule=rule, chunk_tokens=chunk_tokens)


class RecurrentCache(NamedTuple):
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
class CachedRecurrence:
    """A chunk of new tokens, from the state after the tokens before it, context parallel; under
    `jit`.

    A chunk of a prompt is split over the context ranks, which exchange the maps of their states as
    in training. The state after it is on all context ranks. In a decoding step they all compute the
    same token.
    """

    mesh: Mesh
    rule: Rule
    chunk_tokens: int  # of all calls

    def bind(self, new: NewTokens) -> Callable:
        """See `contract.Cached`."""
        return functools.partial(self, new=new)

    def __call__(
        self, *operands: jax.Array, cache: RecurrentCache, layer: jax.Array, new: NewTokens
    ):
        """The outputs out_BCHV, those of padding of any value, and the cache with the states of
        layer `layer` after the new tokens.

        Args:
          operands: the fields of `Operands`, of a chunk that the context axis splits.
        """
        states = RecurrentCache(_STATE, _PAST, _PAST, _PAST)
        operands = Operands(*operands).split_over(self.mesh.shape[TENSOR])
        in_specs = (operands.specs, states, PartitionSpec(), _BATCH)
        is_decoding = self.chunk_tokens == decode_tokens(self.mesh)
        mixed = self._decode if is_decoding else self._prefill

        def local(operands, cache, layer, new):
            state, *past = (lax.dynamic_index_in_dim(x, layer, 1, keepdims=False) for x in cache)
            out, *values = mixed(operands, state, past, new)
            return out, RecurrentCache(*(
                lax.dynamic_update_index_in_dim(stored, x.astype(stored.dtype), layer, 1)
                for stored, x in zip(cache, values, strict=True)
            ))  # fmt: skip

        split = shard_map(local, self.mesh, in_specs, (HEADS, states))
        return split(operands, cache, layer, new)

    # The methods below run inside `shard_map`.

    def _prefill(self, operands: Operands, state: jax.Array, past: list, new: NewTokens):
        arrays = operands[:3]
        num_tokens = arrays[0].shape[1]
        first = lax.axis_index(CONTEXT) * num_tokens
        is_new_bt = first + jnp.arange(num_tokens) < new.num_new_B[:, None]
        inputs = (
            filtered(
                x,
                taps,
                None,
                past_bPW=before.reshape(*before.shape[:2], -1),
                ranks=ranks_of(self.mesh),
            )
            for x, taps, before in zip(arrays, operands.filters, past)
        )
        # padding does not change the state
        g, beta = (jnp.where(like(is_new_bt, x), x, 0) for x in (operands.g_BTH, operands.beta_BTH))
        operands = operands._replace(g_BTH=g, beta_BTH=beta)
        tokens = operands.tokens(*unit_lengths(self.rule, *inputs), None, None)
        out, state = continued_recurrence(tokens, self.rule, state, ranks=ranks_of(self.mesh))
        last = (_last_inputs(*pair, first, new) for pair in zip(past, arrays))
        return out, state, *last

    def _decode(self, operands: Operands, state: jax.Array, past: list, new: NewTokens):
        num_local = operands.q_BTGK.shape[1]
        arrays = jax.tree.map(
            lambda x: lax.all_gather(x, CONTEXT, axis=1, tiled=True)[:, :1], operands[:6]
        )
        operands = Operands(*arrays, operands.filters)
        inputs = [
            jnp.concatenate([before.astype(x.dtype), x], axis=1)
            for before, x in zip(past, operands[:3])
        ]
        last = (filtered(x, taps, None)[:, -1:] for x, taps in zip(inputs, operands.filters))
        tokens = operands.tokens(*unit_lengths(self.rule, *last), None, None)
        out, new_state = one_output(tokens, state, self.rule)
        values = [new_state, *(x[:, 1:] for x in inputs)]
        is_new = new.num_new_B > 0
        old = [before.astype(x.dtype) for x, before in zip(values, (state, *past))]
        values = where(is_new, values, old)
        return jnp.broadcast_to(out, (len(out), num_local, *out.shape[2:])), *values


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
    is_here = (local_bP < x_bthW.shape[1]) & (index_bP >= 0)
    here = lax.psum(rows_at(x_bthW, jnp.where(is_here, local_bP, -1)), CONTEXT)
    past = rows_at(past_bPhW, jnp.where(index_bP < 0, num_past + index_bP, -1))
    return past + here.astype(past_bPhW.dtype)
