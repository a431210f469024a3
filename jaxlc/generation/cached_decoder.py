"""The decoder on a chunk of new tokens, with the cache of the tokens before it.

A prefill chunk and a decoding step are the same function; in the latter, each sequence has one new token.
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

from jaxlc.config import Config
from jaxlc.core.axes import BATCH_AXES, CONTEXT, FIRST_LAYERS, LAST_LAYERS, LAYER_STACKS, LAYERS, TENSOR
from jaxlc.models import decoder
from jaxlc.models.block import rms_norm
from jaxlc.models.cache import Cache, CacheLayout, NewTokens, decode_tokens
from jaxlc.models.contract import Cached, operands
from jaxlc.models.kinds import kinds_on_mesh, mixer_of, reach, tables_of_kinds
from jaxlc.models.layer_stack import Stacks
from jaxlc.models.layers import DecoderLayer
from jaxlc.models.rope import RopeTables, TablesOfKinds
from jaxlc.sharding.rules import Sharder, is_vector, storage_spec


@dataclass(frozen=True, kw_only=True)
class CachedDecoder:
    """The function `(params, cache, tokens, new) -> (logits, cache)`, to be called under `jit`."""

    config: Config
    mesh: Mesh
    layout: CacheLayout
    compute_dtype: jnp.dtype

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
          cache: see `CachedStep.abstract_cache`. Donate it, so that it is updated in place.
          tokens_BC: int32, C a multiple of context x tensor; sequence b has new.num_new_B[b] tokens, then padding.
          tables: RoPE tables of each sequence, of `kinds.stacked_tables`; None: all are for config.data.seq_len.
        Returns:
          Logits of the token after the last new one, float32 [B, V], of any value for a sequence without new tokens;
          the cache with the new tokens.
        """
        shard, model = Sharder(self.mesh), self.config.model
        module = decoder.bind(params, model, self.config.lora)
        x_BCD = module.embedded(tokens_BC, shard, self.compute_dtype)
        # Padding may be beyond the tables and then has the last angles.
        tables = tables or tables_of_kinds(model, self.layout.max_tokens, self.config.data.seq_len)
        run_layer = functools.partial(_run_layer, new=new, shard=shard)
        run_kind = {
            kind: functools.partial(run_layer, attend=cached.bind(new), tables=tables.get(kind))
            for kind, cached in self.cached_kinds(*tokens_BC.shape).items()
        }
        updated = {}
        for name in LAYER_STACKS:
            if name in cache:
                kinds = model.kinds_of_iteration(name)
                x_BCD, updated[name] = self._run_stack(getattr(module, name), kinds, x_BCD, cache[name], run_kind)
        is_last_BC1 = (jnp.arange(tokens_BC.shape[1]) == new.num_new_B[:, None] - 1)[..., None]
        last_BD = jnp.where(is_last_BC1, x_BCD.astype(jnp.float32), 0.0).sum(axis=1).astype(self.compute_dtype)
        normed_BD = rms_norm(last_BD, module.final_norm.factor.astype(jnp.float32), model.norm_epsilon)
        head_DV = module.head_DV(shard, self.compute_dtype)
        logits_BV = jnp.einsum("BD,DV->BV", normed_BD, head_DV, preferred_element_type=jnp.float32)
        return logits_BV[:, : model.vocab_size], updated

    def cached_kinds(self, batch_size: int, chunk_tokens: int) -> dict[str, Cached]:
        """What the layers of each kind compute between their projections, for chunks of `chunk_tokens` tokens."""
        kinds = kinds_on_mesh(self.config, self.mesh, self.compute_dtype)
        sizes = dict(batch_size=batch_size, chunk_tokens=chunk_tokens)
        return {kind: mixer_of(on.model).cached(on, self.layout, **sizes) for kind, on in kinds.items()}

    def _run_stack(
        self,
        layers: DecoderLayer | nnx.Dict,
        kinds: Sequence[str],
        x_BCD: jax.Array,
        caches: tuple[Any, ...],
        run_kind: dict[str, Callable],
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Runs stacked layers, one of each of `kinds` in each iteration. The caches are in the carry of the loop, where
        XLA updates them in place."""
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
    cache: Any,
    index: jax.Array,
    *,
    new: NewTokens,
    attend: Callable,
    tables: RopeTables | None,
    shard: Sharder,
) -> tuple[jax.Array, Any]:
    positions_BC = new.positions_BC(x_BCD.shape[1])
    input_BCD = layer.attention_input(x_BCD, shard=shard)
    mixed, kept = operands(layer.attention, input_BCD, positions_BC, tables=tables, shard=shard)
    out, cache = attend(*mixed, cache=cache, layer=index)
    output, _ = layer.after_attention(x_BCD, out, kept, positions_BC, shard=shard)
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
        return CachedDecoder(config=self.config, mesh=self.mesh, layout=layout, compute_dtype=self.compute_dtype)

    def lower(self, params: dict, layout: CacheLayout, *, batch_size: int, num_tokens: int) -> jax.stages.Lowered:
        """Lowers `jitted` for `num_tokens` tokens of each sequence and `abstract_params`."""

        def numbers(spec: PartitionSpec, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(self.mesh, spec))

        new = NewTokens(numbers(BATCH_SPEC, batch_size), numbers(BATCH_SPEC, batch_size))
        tokens, cache = numbers(TOKENS_SPEC, batch_size, num_tokens), self.abstract_cache(layout, batch_size)
        return self.jitted(layout).lower(params, cache, tokens, new)

    def abstract_cache(self, layout: CacheLayout, batch_size: int) -> Cache:
        """Shapes, dtypes and shardings of the cache."""
        model = self.config.model
        on_mesh = kinds_on_mesh(self.config, self.mesh, self.compute_dtype)
        num_layers = {
            FIRST_LAYERS: len(model.first_layer_kinds),
            LAYERS: model.num_group_layers,
            LAST_LAYERS: model.num_last_layers,
        }
        cache: Cache = {}
        for stack in filter(num_layers.get, num_layers):
            kinds = model.kinds_of_iteration(stack)
            sizes = dict(batch_size=batch_size, num_layers=num_layers[stack] // len(kinds), dtype=self.cache_dtype)
            cache[stack] = tuple(
                mixer_of(on_mesh[kind].model).abstract_cache(on_mesh[kind], layout, **sizes) for kind in kinds
            )
        return cache

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
        # A rank receives the tokens that its layers reach from the rank before it only.
        chunk_tokens = max(chunk_tokens, reach(self.config.model) * self.mesh.shape[CONTEXT])
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
