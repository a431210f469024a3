"""The decoder on a chunk of new tokens, with the cache of the tokens before it.

A prefill chunk and a decoding step are the same function; in the latter, each sequence has one new token.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxlc.config import AttentionConfig, LoraConfig, ModelConfig
from jaxlc.core.axes import LAYER_STACKS
from jaxlc.generation.cache import KV, Cache, CacheLayout, DeltaStates, num_cached_heads
from jaxlc.generation.cached_attention import CachedAttention
from jaxlc.generation.cached_delta_net import CachedDeltaNet
from jaxlc.generation.new_tokens import NewTokens
from jaxlc.models import decoder
from jaxlc.models.layer_stack import Stacks
from jaxlc.models.layers import DecoderLayer
from jaxlc.models.norms import rms_norm
from jaxlc.models.rope import RopeTables, TablesOfKinds, tables_of_kinds
from jaxlc.sharding.rules import Sharder


@dataclass(frozen=True, kw_only=True)
class CachedDecoder:
    """The function `(params, cache, tokens, new) -> (logits, cache)`, to be called under `jit`."""

    model: ModelConfig
    lora: LoraConfig  # the adapters that the parameters contain
    attention: AttentionConfig
    mesh: Mesh
    layout: CacheLayout
    compute_dtype: jnp.dtype
    rope_tokens: int  # see `rope.rope_tables`

    def __call__(
        self,
        params: dict,
        cache: Cache,
        tokens_BC: jax.Array,
        new: NewTokens,
        tables: TablesOfKinds | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Appends the new tokens to the cache.

        Args:
          params: the tree of `decoder.init`, in the compute dtype or float32.
          cache: see `cache.abstract_cache`. Donate it, so that it is updated in place.
          tokens_BC: int32, C a multiple of context x tensor; sequence b has new.num_new_B[b] tokens, then padding.
          tables: RoPE tables of each sequence, of `rope.stacked_tables`; None: all have those of `rope_tokens`.
        Returns:
          Logits of the token after the last new one, float32 [B, V], of any value for a sequence without new tokens;
          the cache with the new tokens.
        """
        shard = Sharder(self.mesh)
        module = decoder.bind(params, self.model, self.lora)
        x_BCD = module.embedded(tokens_BC, shard, self.compute_dtype)
        # Padding may be beyond the tables and then has the last angles.
        tables = tables or tables_of_kinds(self.model, self.layout.max_tokens, self.rope_tokens)
        attention = self.attention_of_kinds(*tokens_BC.shape)
        ranges = {kind: attend.prepare(new) for kind, attend in attention.items()}
        run_layer = functools.partial(_run_layer, new=new, shard=shard)
        run_kind = {
            kind: functools.partial(run_layer, attend=attend, ranges=ranges[kind], tables=tables[kind])
            for kind, attend in attention.items()
        }
        updated = {}
        for name in LAYER_STACKS:
            if name in cache:
                kinds = self.model.kinds_of_iteration(name)
                x_BCD, updated[name] = self._run_stack(getattr(module, name), kinds, x_BCD, cache[name], run_kind)
        is_last_BC1 = (jnp.arange(tokens_BC.shape[1]) == new.num_new_B[:, None] - 1)[..., None]
        last_BD = jnp.where(is_last_BC1, x_BCD.astype(jnp.float32), 0.0).sum(axis=1).astype(self.compute_dtype)
        normed_BD = rms_norm(last_BD, module.final_norm.factor.astype(jnp.float32), self.model.norm_epsilon)
        head_DV = module.head_DV(shard, self.compute_dtype)
        logits_BV = jnp.einsum("BD,DV->BV", normed_BD, head_DV, preferred_element_type=jnp.float32)
        return logits_BV[:, : self.model.vocab_size], updated

    def attention_of_kinds(self, batch: int, chunk_tokens: int) -> dict[str, CachedAttention | CachedDeltaNet]:
        """The attention of each kind of layers, for chunks of `chunk_tokens` tokens."""

        def attention_of(kind: str) -> CachedAttention | CachedDeltaNet:
            model = self.model.of_kind(kind)
            if model.mixer == "gated_delta_net":
                return CachedDeltaNet(mesh=self.mesh, chunk_tokens=chunk_tokens)
            shape = batch, chunk_tokens, model.num_heads, model.head_dim
            return CachedAttention(
                config=self.attention,
                mesh=self.mesh,
                layout=self.layout,
                window=model.window_of(kind),
                q_like=jax.ShapeDtypeStruct(shape, self.compute_dtype),
                num_kv_heads=num_cached_heads(model, self.mesh),
            )

        return {kind: attention_of(kind) for kind in self.model.used_kinds}

    def _run_stack(
        self,
        layers: DecoderLayer | nnx.Dict,
        kinds: Sequence[str],
        x_BCD: jax.Array,
        caches: tuple[KV | DeltaStates, ...],
        run_kind: dict[str, Callable],
    ) -> tuple[jax.Array, tuple[KV | DeltaStates, ...]]:
        """Runs stacked layers, those of `kinds` in each iteration. The caches are in the carry of the loop, where XLA
        updates them in place."""
        stacks = Stacks.split(layers)
        places = stacks.places(kinds)

        def run_period(carry, inputs):
            (x_BCD, caches), (params, index) = carry, inputs
            updated = []
            for place, cache in zip(places, caches, strict=True):
                own = jax.tree.map(operator.itemgetter(place.index), params.of(place.stack))
                layer = nnx.merge(stacks.defs[place.stack], *own)
                x_BCD, cache = run_kind[place.kind](layer, x_BCD, cache, index)
                updated.append(cache)
            return (x_BCD, tuple(updated)), None

        num_periods = stacks.num_layers // len(places)
        inputs = stacks.grouped(places), jnp.arange(num_periods, dtype=jnp.int32)
        return lax.scan(run_period, (x_BCD, caches), inputs)[0]


def _run_layer(
    layer: DecoderLayer,
    x_BCD: jax.Array,
    cache: KV | DeltaStates,
    index: jax.Array,
    *,
    new: NewTokens,
    attend: CachedAttention | CachedDeltaNet,
    ranges: Any,
    tables: RopeTables | None,
    shard: Sharder,
) -> tuple[jax.Array, KV | DeltaStates]:
    positions_BC = new.positions_BC(x_BCD.shape[1])
    input_BCD = layer.attention_input(x_BCD, shard=shard)
    operands, gate_BCNH = layer.attention.operands(input_BCD, positions_BC, shard=shard, tables=tables)
    out_BCNH, cache = attend(*operands, cache=cache, layer=index, new=new, ranges=ranges)
    output, _ = layer.after_attention(x_BCD, out_BCNH, gate_BCNH, positions_BC, shard=shard)
    return output.x_BTD, cache
