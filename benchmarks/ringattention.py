"""The package `ringattention` 0.1.2 (Liu et al.) as a contestant. Not a dependency: install it where it is wanted."""

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.core.errors import UserError


def make(mesh: Mesh, chunk_tokens: int) -> Callable:
    """Its causal ring attention as `attend(q_BTNH, k_BTNH, v_BTNH) -> out_BTNH`, in natural order.

    Raises:
      UserError: the package is not installed.
    """
    # Its last release reads an attribute that jax has since removed, at import.
    from jax.extend import backend

    jax.lib.xla_bridge = type("xla_bridge", (), {"get_backend": staticmethod(backend.get_backend)})
    try:
        from ringattention.ringattention_jax import ring_attention
    except ImportError as error:
        raise UserError(f"no contestant ({error}); pip install ringattention==0.1.2 einops") from None
    settings = dict(
        causal_block_size=1,
        deterministic=True,
        dropout_rng=None,
        attn_pdrop=0.0,
        query_chunk_size=chunk_tokens,
        key_chunk_size=chunk_tokens,
        dtype=jax.numpy.float32,
        policy=jax.checkpoint_policies.nothing_saveable,
        precision=None,
        prevent_cse=False,
    )
    heads = PartitionSpec(BATCH_AXES, CONTEXT, TENSOR, None)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads, check_vma=False)
    def attend(q, k, v):
        return ring_attention(q, k, v, None, None, None, CONTEXT, True, settings)

    return attend
