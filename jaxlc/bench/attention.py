"""Attention by itself: any strategy, kernel, shape and mesh, forward or forward and backward."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc import attention
from jaxlc.bench.timing import seconds_of_calls
from jaxlc.config import AttentionConfig
from jaxlc.core import hardware
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.sharding.layout import zigzag_order


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement: causal attention of one row to itself."""

    strategy: str
    kernel: str = "auto"
    backward: bool = True  # forward and backward, else forward alone
    sequence_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"

    @property
    def causal_flops(self) -> float:
        """2 x 2 H FLOP for each of T (T + 1) / 2 visible pairs and N heads; 2.5 times that backward, as is usual: five
        products of that size instead of two (FlashAttention-2, section 3.1)."""
        pairs = self.sequence_tokens * (self.sequence_tokens + 1) / 2
        return 4.0 * self.num_heads * self.head_dim * pairs * (3.5 if self.backward else 1.0)


def measure(case: Case, mesh: Mesh, config: AttentionConfig, repeats: int) -> dict:
    """A row of figures for our own attention."""
    attend = attention.make(config, mesh)
    order = zigzag_order(case.sequence_tokens, mesh.shape[CONTEXT])
    positions = jax.device_put(
        jnp.asarray(order, jnp.int32)[None], NamedSharding(mesh, PartitionSpec(BATCH_AXES, CONTEXT))
    )
    return measure_function(case, mesh, lambda q, k, v: attend(q, k, v, positions, None)[0], repeats)


def measure_function(case: Case, mesh: Mesh, attend: Callable, repeats: int) -> dict:
    """A row of figures for `attend(q_BTNH, k_BTKH, v_BTKH) -> out_BTNH`, on random inputs split over the mesh.

    Returns:
      the case; seconds (median) and seconds_min of a call; tflops, causal, over all devices; share_of_peak, None where
      the device's peak is not known; temp_bytes of one device's program.
    """
    q, k, v, dout = _inputs(case, mesh)

    def gradient(q, k, v):
        return jax.grad(lambda *qkv: (attend(*qkv) * dout).sum().astype(jnp.float32), (0, 1, 2))(q, k, v)

    compiled = jax.jit(gradient if case.backward else attend).lower(q, k, v).compile()
    seconds = seconds_of_calls(compiled, q, k, v, repeats=repeats)
    device = hardware.find(mesh.devices.flat[0].device_kind)
    rate = case.causal_flops / statistics.median(seconds)
    return asdict(case) | dict(
        mesh=" ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1),
        seconds=statistics.median(seconds),
        seconds_min=min(seconds),
        tflops=rate / 1e12,
        share_of_peak=rate / (device.bf16_flops_per_second * mesh.size) if device else None,
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
    )


def _inputs(case: Case, mesh: Mesh) -> tuple[jax.Array, ...]:
    """Random (q, k, v, dout); zeros would flatter a GPU."""
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES, CONTEXT, TENSOR, None))
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
    keys = jax.random.split(jax.random.key(0), len(heads))
    shapes = [(1, case.sequence_tokens, count, case.head_dim) for count in heads]
    arrays = [jax.random.normal(key, shape, case.dtype) for key, shape in zip(keys, shapes)]
    return tuple(jax.device_put(array, sharding) for array in arrays)
