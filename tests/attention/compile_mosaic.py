"""Compiles the kernel `mosaic` for an absent GPU, in all supported head dims.

    python -m tests.attention.compile_mosaic h100

It needs tokamax and the GPU compiler. One process compiles for one GPU generation
(`kernels/mosaic.py`).
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.attention import make
from jaxlc.attention.contract import AttentionSpec, KeyRanges, QueryResults
from jaxlc.attention.kernels import mosaic
from jaxlc.config import AttentionConfig, MeshConfig
from jaxlc.core.axes import CONTEXT
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology

# GPU -> (head dim of queries and keys, head dim of values). The widest of each is the limit of
# `mosaic.unsupported`.
HEAD_DIMS = {
    "h100": ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)),
    "b200": ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192)),
}
NUM_TOKENS = 4200  # more than one call of the backward, and no multiple of a block


def compile_kernel(gpu: str, head_dim: int, value_dim: int) -> str:
    """Both passes, with ranges and a gradient of the lse, grouped queries, and more keys than
    queries.
    """
    mesh = make_mesh(topology(f"{gpu}:1x1"), MeshConfig())

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    q, k, v = (
        array(2, NUM_TOKENS, 4, head_dim),
        array(2, 5000, 2, head_dim),
        array(2, 5000, 2, value_dim),
    )
    out, lse = (
        array(2, NUM_TOKENS, 4, value_dim, dtype=jnp.float32),
        array(2, 4, NUM_TOKENS, dtype=jnp.float32),
    )
    ranges = KeyRanges(*[array(2, NUM_TOKENS, dtype=jnp.int32)] * 2)

    def both(q, k, v, ranges, out, lse):
        spec = AttentionSpec()
        return mosaic.forward(q, k, v, ranges, spec), mosaic.backward(
            q, k, v, ranges, spec, QueryResults(out, lse, out, lse)
        )

    on_device = jax.shard_map(
        both, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    lowered = jax.jit(on_device).lower(q, k, v, ranges, out, lse)
    return lowered.compile(compiler_options=dict(WITHOUT_GPU)).as_text()


def compile_ring(gpu: str) -> str:
    """The gradient of a ring over 2 GPUs with packed documents, through `make`."""
    mesh = make_mesh(topology(f"{gpu}:1x2"), MeshConfig(context=2))
    attend = make(AttentionConfig(kernel="mosaic"), mesh)
    sharding = NamedSharding(mesh, PartitionSpec(None, CONTEXT))
    q, k = (
        jax.ShapeDtypeStruct((1, 2048, n, 128), jnp.bfloat16, sharding=sharding) for n in (4, 2)
    )
    segments = jax.ShapeDtypeStruct((1, 2048), jnp.int32, sharding=sharding)

    def loss(q, k, v, segments):
        return attend(q, k, v, attend.prepare(None, segments))[0].astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, segments)
    return lowered.compile(compiler_options=dict(WITHOUT_GPU)).as_text()


if __name__ == "__main__":
    (gpu,) = sys.argv[1:]
    for head_dims in HEAD_DIMS[gpu]:
        assert "mosaic_gpu" in compile_kernel(gpu, *head_dims)
        print("compiled", gpu, *head_dims, flush=True)
    assert "mosaic_gpu" in compile_ring(gpu)
    print("compiled", gpu, "ring")
