"""The decoder on a chunk of new tokens, with the cache of the tokens before it.

A prefill chunk and a decoding step are the same function; in the latter, each sequence has one new token.

The compiled function of generation: its arguments with their shardings, and the sizes that they are padded to.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.config import AttentionConfig, Config, LoraConfig, ModelConfig
from jaxlc.core.axes import BATCH_AXES, CONTEXT, LAYER_STACKS, TENSOR
from jaxlc.models import decoder
from jaxlc.models.block import rms_norm
from jaxlc.models.cache import (
    KV,
    Cache,
    CacheLayout,
    DeltaStates,
    NewTokens,
    abstract_cache,
    decode_tokens,
    num_cached_heads,
)
from jaxlc.models.kinds.attention import CachedAttention
from jaxlc.models.kinds.delta_net import CachedDeltaNet
from jaxlc.models.layer_stack import Stacks
from jaxlc.models.layers import DecoderLayer
from jaxlc.models.rope import RopeTables, TablesOfKinds, tables_of_kinds
from jaxlc.sharding.rules import Sharder, is_vector, storage_spec


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


CHUNK_TOKENS = 2048  # tokens per prefill chunk and context rank
TOKENS_SPEC = PartitionSpec(BATCH_AXES, (CONTEXT, TENSOR))  # for int32 [B, C]
BATCH_SPEC = PartitionSpec(BATCH_AXES)  # for int32 [B]


@dataclass(frozen=True, kw_only=True)
class CachedStep:
    """Compiles `CachedDecoder` for a mesh, whose devices may be absent."""

    config: Config
    mesh: Mesh
    compute_dtype: jnp.dtype
    cache_dtype: jnp.dtype

    def jitted(self, layout: CacheLayout) -> jax.stages.Wrapped:
        """The function `(params, cache, tokens, new, tables) -> (logits, cache)`; the cache is updated in place."""
        replicated = NamedSharding(self.mesh, PartitionSpec())
        cache = jax.tree.map(lambda x: x.sharding, self.abstract_cache(layout, 1))
        return jax.jit(self._decoder(layout).__call__, donate_argnums=1, out_shardings=(replicated, cache))

    def _decoder(self, layout: CacheLayout) -> CachedDecoder:
        return CachedDecoder(
            model=self.config.model,
            lora=self.config.lora,
            attention=self.config.attention,
            mesh=self.mesh,
            layout=layout,
            compute_dtype=self.compute_dtype,
            rope_tokens=self.config.data.seq_len,
        )

    def lower(self, params: dict, layout: CacheLayout, *, batch_size: int, num_tokens: int) -> jax.stages.Lowered:
        """Lowers `jitted` for `num_tokens` tokens of each sequence and `abstract_params`."""

        def numbers(spec: PartitionSpec, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(self.mesh, spec))

        new = NewTokens(numbers(BATCH_SPEC, batch_size), numbers(BATCH_SPEC, batch_size))
        tokens, cache = numbers(TOKENS_SPEC, batch_size, num_tokens), self.abstract_cache(layout, batch_size)
        return self.jitted(layout).lower(params, cache, tokens, new)

    def abstract_cache(self, layout: CacheLayout, batch_size: int) -> Cache:
        return abstract_cache(self.config.model, self.mesh, layout, batch_size=batch_size, dtype=self.cache_dtype)

    def padded_batch_size(self, num_prompts: int) -> int:
        """The smallest batch size of at least `num_prompts` that splits over the mesh."""
        multiple = math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)
        return -(-num_prompts // multiple) * multiple

    @property
    def decode_tokens(self) -> int:
        """See `cache.decode_tokens`."""
        return decode_tokens(self.mesh)

    def prefill_tokens(self, longest: int, chunk_tokens: int = 0) -> int:
        """Tokens of a chunk for prompts of up to `longest` tokens: `decode_tokens` times a power of two from 2, so that
        prompts of similar lengths use the same program, which is not the one of a decoding step.

        Args:
          chunk_tokens: the largest number, unless the smallest chunk is larger; rounded up. 0: `CHUNK_TOKENS` per rank.
        """
        chunk_tokens = min(longest, chunk_tokens or CHUNK_TOKENS * self.mesh.shape[CONTEXT])
        # A rank receives the inputs of short convolutions from the rank before it only.
        chunk_tokens = max(chunk_tokens, (self.config.model.delta_conv_taps - 1) * self.mesh.shape[CONTEXT])
        return self.decode_tokens * 2 ** max(1, math.ceil(math.log2(chunk_tokens / self.decode_tokens)))


def abstract_params(params: dict, dims: dict, mesh: Mesh, dtype: jnp.dtype) -> dict:
    """Shapes, dtypes and shardings of the parameters in generation: matrices in `dtype`; scales of norms and biases
    remain in float32, in which they are used. They are sharded as stored parameters.

    Args:
      params: the tree of `decoder.init`, of arrays or of `jax.ShapeDtypeStruct`s.
      dims: of `decoder.dims_of`.
    """

    def abstract(x, its_dims):
        sharding = NamedSharding(mesh, storage_spec(its_dims, x.shape, mesh))
        return jax.ShapeDtypeStruct(x.shape, x.dtype if is_vector(its_dims) else dtype, sharding=sharding)

    return jax.tree.map(abstract, params, dims)


def cast_params(params: dict, abstract: dict) -> dict:
    """A copy of the parameters with the dtypes and shardings of `abstract_params`."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    dtypes = jax.tree.map(lambda x: x.dtype, abstract)
    return jax.jit(lambda tree: jax.tree.map(lambda x, dtype: x.astype(dtype), tree, dtypes), out_shardings=shardings)(
        params
    )
