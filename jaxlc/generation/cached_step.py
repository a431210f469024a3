"""The compiled function of generation: its arguments with their shardings, and the sizes that they are padded to."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.config import Config
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.generation.cache import Cache, CacheLayout, abstract_cache, decode_tokens
from jaxlc.generation.cached_decoder import CachedDecoder
from jaxlc.generation.new_tokens import NewTokens
from jaxlc.sharding.rules import is_vector, storage_spec

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
