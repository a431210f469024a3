"""A kind of layers whose tokens are decayed causal means: S = a S + (1 - a) v, and the output is S.

The decay a of each head is trained. The kind runs in tiles, and passes its states along zigzag
order.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.attention.query_tiles import tiles_of
from jaxlc.attention.state_passing import (
    Affine,
    continued_states,
    entering_states,
    fragments_of,
    predecessors,
    tile_states,
    total,
)
from jaxlc.config.kinds import mixer_matrices
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.models.contract import KindOnMesh, Mixer, OnTiles, PassesStates, Sequences, Tiles
from jaxlc.models.layer_tiles import RecurrentTiles
from jaxlc.sharding.mesh import Ranks

HEADS, TOKENS = PartitionSpec(BATCH_AXES, CONTEXT, TENSOR), PartitionSpec(BATCH_AXES, CONTEXT)
DECAY, STATE = PartitionSpec(TENSOR), PartitionSpec(BATCH_AXES, None, TENSOR)
PIECES = PartitionSpec(CONTEXT, BATCH_AXES, TENSOR)  # [2 x ranks, B, H, ...]


class DecayedMean(Mixer, OnTiles, PassesStates):
    """wv [D, H, V], decay [H] and wo [H, V, D]."""

    def __init__(self, model, init):
        super().__init__(model, init)
        self.decay = nnx.Param(jnp.ones(self.wv.shape[1], jnp.float32), dims=("decay",))

    def operands(self, x_BTD, *, shard):
        v_BTHV = shard.heads(self.project("value", "BTD,DHV->BTHV", x_BTD, shard=shard))
        return (checkpoint_name(v_BTHV, "mean_values"), jax.nn.sigmoid(self.decay[...])), None

    def projected(self, out, kept, *, shard):
        out_BTD = self.project(
            "attention_projected", "BTHV,HVD->BTD", shard.heads(out), shard=shard
        )
        return checkpoint_name(shard.residual(out_BTD), "attention_projected")

    @classmethod
    def on_sequences(cls, on: KindOnMesh) -> Sequences:
        ranks = _ranks(on.mesh)
        mean = _split(functools.partial(_mean, ranks=ranks), on.mesh, (HEADS, DECAY, TOKENS), HEADS)
        return Sequences(
            functools.partial(_continues, mesh=on.mesh), lambda v, a, *, ranges: mean(v, a, ranges)
        )

    @classmethod
    def on_tiles(cls, on: KindOnMesh) -> Tiles:
        def prepare(tokens):
            return tiles_of(_continues(tokens, mesh=on.mesh), on.mesh.shape[CONTEXT], on.num_tiles)

        return Tiles(prepare, RecurrentTiles(TiledMean(on.mesh)))

    @classmethod
    def abstract_cache(cls, on, layout, *, batch_size, num_layers, dtype):
        shape = batch_size, num_layers, *mixer_matrices(on.model)["wv"].outputs.values()
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(on.mesh, STATE))

    @classmethod
    def cached(cls, on, layout, *, batch_size, chunk_tokens):
        return CachedMean(on.mesh)


class TiledMean(NamedTuple):
    """The `TileRecurrence` of the kind."""

    mesh: Mesh

    def before(self, operands, x_nBtD, ranges):
        return ()

    def maps(self, operands, before, ranges):
        def local(v, a, continues):
            pieces = fragments_of(_maps(v, a, continues), 2, 0)
            return jax.tree.map(lambda *x: jnp.stack(x), *map(total, pieces))

        return _split(local, self.mesh, (HEADS, DECAY, TOKENS), PIECES)(*operands, ranges)

    def states(self, maps):
        pieces = PartitionSpec(None, *PIECES)
        return _split(
            functools.partial(tile_states, ranks=_ranks(self.mesh)), self.mesh, (pieces,), pieces
        )(maps)

    def outputs(self, operands, before, states, ranges):
        def local(v, a, continues, states):
            pieces = zip(fragments_of(_maps(v, a, continues), 2, 0), states)
            return _outputs(jnp.concatenate([_after(maps, S) for maps, S in pieces]), v)

        return _split(local, self.mesh, (HEADS, DECAY, TOKENS, PIECES), HEADS)(
            *operands, ranges, states
        )


class CachedMean(NamedTuple):
    """New tokens of a chunk, which the ranks split, after the state of the tokens before it."""

    mesh: Mesh

    def bind(self, new) -> Callable:
        def local(v, a, cache, layer, num_new_b):
            first = lax.axis_index(CONTEXT) * v.shape[1]
            is_new = (first + jnp.arange(v.shape[1]) < num_new_b[:, None])[..., None, None]
            maps = _maps(v, a, jnp.ones(v.shape[:2], bool))
            is_new = jnp.moveaxis(is_new, 1, 0)[..., None]  # padding does not change the state
            maps = Affine(jnp.where(is_new, maps.M, 1), jnp.where(is_new, maps.U, 0))
            state = lax.dynamic_index_in_dim(cache, layer, 1, keepdims=False)[:, :, None]
            states, last = continued_states(maps, state, _ranks(self.mesh))
            cache = lax.dynamic_update_index_in_dim(cache, last[:, :, 0], layer, 1)
            return _outputs(jax.vmap(Affine.__call__)(maps, states), v), cache

        batch = PartitionSpec(BATCH_AXES)
        call = _split(
            local, self.mesh, (HEADS, DECAY, STATE, PartitionSpec(), batch), (HEADS, STATE)
        )
        return lambda v, a, *, cache, layer: call(v, a, cache, layer, new.num_new_B)


def _ranks(mesh: Mesh) -> Ranks:
    return Ranks(CONTEXT, mesh.shape[CONTEXT])


def _split(local, mesh, in_specs, out_specs):
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _continues(tokens, *, mesh):
    """bool [B, T]: the document of a token is that of the token before it."""
    segments_BT = (
        jnp.ones_like(tokens.positions_BT) if tokens.segments_BT is None else tokens.segments_BT
    )
    ranks = _ranks(mesh)

    def local(segments_bt):
        fragments = jnp.split(segments_bt, 2 if ranks.size > 1 else 1, axis=1)
        before = predecessors([fragment[:, -1:] for fragment in fragments], ranks)
        shifted = [jnp.concatenate([b, x[:, :-1]], 1) for b, x in zip(before, fragments)]
        return jnp.concatenate([a == b for a, b in zip(shifted, fragments)], 1)

    return _split(local, mesh, (TOKENS,), TOKENS)(segments_BT)


def _maps(v_bthV, a_h, continues_bt) -> Affine:
    """The map of each token, arrays [t, b, h, 1, 1 or V]."""
    M = jnp.where(continues_bt[..., None], a_h, 0)[..., None, None]
    U = ((1 - a_h)[:, None] * v_bthV.astype(jnp.float32))[:, :, :, None]
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), Affine(M, U))


def _after(maps: Affine, S: jax.Array) -> jax.Array:
    """The states after all tokens, from the one before the first."""
    return lax.scan(lambda S, token: (token(S), token(S)), S, maps)[1]


def _outputs(states: jax.Array, v_bthV: jax.Array) -> jax.Array:
    """[b, t, h, V] from the states after the tokens, [t, b, h, 1, V]."""
    return jnp.moveaxis(states[:, :, :, 0], 0, 1).astype(v_bthV.dtype)


def _mean(v_bthV, a_h, continues_bt, *, ranks: Ranks):
    maps = _maps(v_bthV, a_h, continues_bt)
    states = entering_states(maps, ranks, 2 if ranks.size > 1 else 1)
    out = _outputs(jax.vmap(Affine.__call__)(maps, states), v_bthV)
    return checkpoint_name(out, "attention_out")
