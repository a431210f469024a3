"""Latent attention: keys and values of all heads are products of one latent per token (DeepSeek-V2,
arXiv:2405.04434, section 2.1).

    latent, shared = x wkv_down        one vector of L, and one of P, which RoPE rotates, per token
    k, v = norm(latent) wkv_up         H - P and V per head; the shared part follows in each key

Queries have no latent, or one of their own. Attention itself is `kinds.attention.SoftmaxAttention`
with as many key/value heads as query heads.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from jaxlc.attention.contract import AttentionSpec, KeysValues
from jaxlc.attention.kernels.choose import KernelSelection
from jaxlc.attention.strategies.strategy import Expansion, split_expanded
from jaxlc.config import ModelConfig
from jaxlc.config.kinds.latent import sends_latents
from jaxlc.core import Unsupported, scopes
from jaxlc.models.block import Init, RMSNorm
from jaxlc.models.cached_attention import KV, CachedAttention, kv_spec
from jaxlc.models.contract import CacheLayout, KindOnMesh, Rotation, Sequences
from jaxlc.models.kinds.attention import SoftmaxAttention, choose_kernel
from jaxlc.models.matmuls import in_use
from jaxlc.models.rope import query_factor
from jaxlc.sharding.rules import Sharder


class LatentAttention(SoftmaxAttention):
    """Projections to latents and from them to heads, norms of the latents, and RoPE."""

    wkv_up: nnx.Param

    def __init__(self, model: ModelConfig, init: Init):
        super().__init__(model, init)
        latent = model.latent
        self.query_multiplier *= query_factor(model)
        norm = functools.partial(RMSNorm, epsilon=latent.norm_epsilon)
        self.q_norm = norm(norm=latent.query_rank) if latent.query_rank else None
        self.kv_norm = norm(norm=latent.rank)
        self.rank = latent.rank
        self.own_dim = model.attention.head_dim - model.rotated_dim
        self.value_dim = latent.value_dim
        self.is_interleaved = latent.interleaved

    @jax.named_scope(scopes.ATTENTION)
    def queries(
        self, x_BTD: jax.Array, rotation: Rotation, *, shard: Sharder
    ) -> tuple[jax.Array, None]:
        """Returns q_BTNH, with RoPE in its last dimensions, and None. `x_BTD` is the input of the
        block, gathered over tensor.
        """
        if self.q_norm is None:
            q_BTNH = self.project("query", "BTD,DNH->BTNH", x_BTD, shard=shard)
        else:
            latent_BTL = self.project("query_down", "BTD,DL->BTL", x_BTD, shard=shard)
            latent_BTL = checkpoint_name(self.q_norm(shard.gathered(latent_BTL)), "latent")
            q_BTNH = self.project("query_up", "BTL,LNH->BTNH", latent_BTL, shard=shard)
        own, rotated = jnp.split(
            self.scaled_queries(shard.heads(q_BTNH), rotation), [self.own_dim], -1
        )
        q_BTNH = jnp.concatenate([own, self.rotated(rotated, rotation)], axis=-1)
        return checkpoint_name(q_BTNH, "query"), None

    def operands(
        self, x_BTD: jax.Array, rotation: Rotation, *, shard: Sharder
    ) -> tuple[tuple, None]:
        """Returns (q_BTNH, k_BTNH, v_BTNH, None, (latent_BTC, weights)), of which attention uses
        either keys and values, or the latents that they are products of; and None.
        """
        q_BTNH, _ = self.queries(x_BTD, rotation, shard=shard)
        latent_BTC = self._latents(x_BTD, rotation, shard=shard)
        keys_values = self._expanded(latent_BTC, shard=shard)
        weight_RNE = in_use(self.wkv_up, shard, x_BTD.dtype)
        a_Rr = None
        b_rNE = None
        if self.lora is not None and "key_value" in self.lora.names:
            adapter = self.lora.of("key_value")
            a_Rr = in_use(adapter.a, shard, x_BTD.dtype)
            b_rNE = adapter.scale * in_use(adapter.b, shard, x_BTD.dtype)
        weights = Expansion(weight_RnE=weight_RNE, a_Rr=a_Rr, b_rnE=b_rNE, own_dim=self.own_dim)
        latents = latent_BTC.astype(jnp.float32), weights
        return (q_BTNH, *keys_values, None, latents), None

    def keys_values(self, x_BTD: jax.Array, rotation: Rotation, *, shard: Sharder) -> KeysValues:
        """Returns (k_BTNH, v_BTNH), K with RoPE in its last dimensions, and V padded with zeros to the
        width of K, since not all kernels take values of another width. `x_BTD` is the input of the
        block, gathered over tensor.
        """
        return self._expanded(self._latents(x_BTD, rotation, shard=shard), shard=shard)

    @jax.named_scope(scopes.ATTENTION)
    def _latents(self, x_BTD: jax.Array, rotation: Rotation, *, shard: Sharder) -> jax.Array:
        """The normed latents and the rotated part of the keys, [B, T, R + P]."""
        latent_BTL = self.project("latent", "BTD,DL->BTL", x_BTD, shard=shard)
        latent_BTL, shared_BTP = jnp.split(shard.gathered(latent_BTL), [self.rank], axis=-1)
        shared_BT1P = self.rotated(shared_BTP[:, :, None], rotation)
        latent_BTC = jnp.concatenate([self.kv_norm(latent_BTL), shared_BT1P[:, :, 0]], axis=-1)
        return checkpoint_name(latent_BTC, "latent")

    @jax.named_scope(scopes.EXPANSION)
    def _expanded(self, latent_BTC: jax.Array, *, shard: Sharder) -> KeysValues:
        """`keys_values` of latents."""
        latent_BTL, shared_BTP = jnp.split(latent_BTC, [self.rank], axis=-1)
        expanded = self.project("key_value", "BTL,LNH->BTNH", latent_BTL, shard=shard)
        k_BTNH, v_BTNV = split_expanded(shard.heads(expanded), shared_BTP, self.own_dim)
        v_BTNV = checkpoint_name(v_BTNV, "value")
        v_BTNH = _padded(v_BTNV, k_BTNH.shape[-1] - self.value_dim)
        return checkpoint_name(shard.heads(k_BTNH), "key"), v_BTNH

    @jax.named_scope(scopes.ATTENTION)
    def projected(self, out_BTNV: jax.Array, kept: None, *, shard: Sharder) -> jax.Array:
        """The output projection, out_BTD; of padded values, the first dimensions."""
        out_BTNV = shard.heads(out_BTNV)[..., : self.value_dim]
        out_BTD = self.project("attention_projected", "BTNV,NVD->BTD", out_BTNV, shard=shard)
        return checkpoint_name(shard.residual(out_BTD), "attention_projected")

    @classmethod
    def on_sequences(cls, on: KindOnMesh) -> Sequences:
        sharded = cls.sharded(on)
        value_dim = on.model.latent.value_dim
        prepare, _ = super().on_sequences(on)
        _, is_padded = _kernel(on)

        def attend_heads(q_BTNH, k_BTNH, v_BTNH, sinks_N, latents, *, ranges):
            del latents
            v_BTNV = v_BTNH if is_padded else v_BTNH[..., :value_dim]
            return sharded(q_BTNH, k_BTNH, v_BTNV, ranges, sinks_N)[0]

        def attend_latents(q_BTNH, k_BTNH, v_BTNH, sinks_N, latents, *, ranges):
            del k_BTNH, v_BTNH, sinks_N
            latent_BTC, weights = latents
            if is_padded:
                missing = on.model.attention.head_dim - value_dim
                weights = jax.tree.map(lambda x: _padded(x, missing) if x.ndim > 2 else x, weights)
            return sharded(q_BTNH, latent_BTC, weights, ranges)[0]

        return Sequences(prepare, attend_latents if sends_latents(on.config) else attend_heads)

    @classmethod
    def kernel(cls, on: KindOnMesh) -> KernelSelection:
        return _kernel(on)[0]

    @classmethod
    def abstract_cache(
        cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, num_layers: int, dtype
    ) -> "Latents":
        shape = batch_size, num_layers, layout.max_tokens, 1, _cached_dim(on)
        sharding = NamedSharding(on.mesh, kv_spec(None, CachedLatentAttention.head_axis))
        return Latents(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))

    @classmethod
    def cached(
        cls, on: KindOnMesh, layout: CacheLayout, *, batch_size: int, chunk_tokens: int
    ) -> "CachedLatentAttention":
        attention = super().cached(on, layout, batch_size=batch_size, chunk_tokens=chunk_tokens)
        return CachedLatentAttention(**vars(attention), latent_dim=_cached_dim(on))


class Latents(NamedTuple):
    """The cache of some layers that have the same place in the period of layer kinds, equal on all
    tensor ranks: [B, layers, tokens, 1, R + P].
    """

    latent: jax.Array


@dataclass(frozen=True, kw_only=True)
class CachedLatentAttention(CachedAttention):
    """The cache has the normed latents and the rotated part of the keys.

    For a chunk of a prompt, the latents of a layer are expanded to heads. A decoding step attends
    to the latents themselves, as one key/value head: the weights of keys multiply its query, and
    the weights of values the result (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
    """

    latent_dim: int  # R + P
    head_axis = None

    def __call__(self, q_BCNH, k_BCNH, v_BCNH, sinks_N=None, latents=None, **arguments):
        latent_BCL, weights = latents
        added = Latents(latent_BCL[:, :, None].astype(q_BCNH.dtype))
        kv = KV(k_BCNH, v_BCNH)
        return self._attend(q_BCNH, kv, added, sinks_N, weights=weights, **arguments)

    @property
    def _cached_dim(self) -> int:
        return self.latent_dim if self._is_decoding else super()._cached_dim

    @property
    def _spec(self) -> AttentionSpec:
        return dataclasses.replace(super()._spec, scale=self.q_like.shape[-1] ** -0.5)

    def _keys_values(self, stored: Latents, weights: Expansion) -> KV:
        k_bsnH, v_bsnV = weights.keys_values(stored.latent[:, :, 0])
        return KV(k_bsnH, _padded(v_bsnV, k_bsnH.shape[-1] - v_bsnV.shape[-1]))

    def _attend_to_cache(self, q_b1nH, cache: Latents, layer, num_keys_b, weights: Expansion):
        keys_RnI, values_RnV = jnp.split(weights.product_RnE, [weights.own_dim], axis=-1)
        own, rotated_b1nP = jnp.split(q_b1nH, [weights.own_dim], axis=-1)
        q_b1nL = jnp.concatenate([jnp.einsum("btnI,RnI->btnR", own, keys_RnI), rotated_b1nP], -1)
        out, lse = super()._attend_to_cache(q_b1nL, cache * 2, layer, num_keys_b, weights)
        out_b1nR = out[..., : len(keys_RnI)].astype(q_b1nH.dtype)
        out_b1nV = jnp.einsum("btnR,RnV->btnV", out_b1nR, values_RnV)
        return out_b1nV.astype(jnp.float32), lse


def _kernel(on: KindOnMesh) -> tuple[KernelSelection, bool]:
    """The kernel of training, and whether it needs values as wide as keys."""
    padded = choose_kernel(on)
    try:
        selection = choose_kernel(on, on.model.latent.value_dim)
    except Unsupported:  # the kernel that the config names
        return padded, True
    return (selection, False) if selection.name == padded.name else (padded, True)


def _cached_dim(on: KindOnMesh) -> int:
    """Entries of a token in the cache of a layer."""
    return on.model.latent.rank + on.model.rotated_dim


def _padded(x: jax.Array, missing: int) -> jax.Array:
    """x with `missing` zeros after the last dimension."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
