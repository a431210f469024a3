"""Attention by itself: any strategy, kernel, shape and mesh, forward or forward and backward."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc import attention
from jaxlc.config import AttentionConfig
from jaxlc.core import hardware
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement: causal attention of one row to itself."""

    strategy: str
    kernel: str = "auto"
    backward: bool = True  # forward and backward, else forward alone
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    window: int = 0  # sliding window, tokens; 0: none
    ulysses_degree: int = 1  # of strategy hybrid

    @property
    def causal_flops(self) -> float:
        """2 x 2 H FLOP for each visible pair and N heads; 2.5 times that backward, as is usual: five products of that
        size instead of two (FlashAttention-2, section 3.1). Pairs: T (T + 1) / 2, or what a window leaves of them."""
        num_tokens = self.seq_len
        before = num_tokens - min(self.window or num_tokens, num_tokens)  # queries whose window is cut off at its end
        pairs = num_tokens * (num_tokens + 1) / 2 - before * (before + 1) / 2
        return 4.0 * self.num_heads * self.head_dim * pairs * (3.5 if self.backward else 1.0)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A compiled attention with its inputs, ready to be timed."""

    case: Case
    mesh: Mesh
    compiled: jax.stages.Compiled
    inputs: tuple[jax.Array, ...]

    def call(self):
        return self.compiled(*self.inputs)

    def row(self, seconds: list[float]) -> dict:
        """The case; seconds (median) and seconds_min of a call; tflops, causal, over all devices; share_of_peak, None
        where the device's peak is not known; temp_bytes of one device's program."""
        device = hardware.find(self.mesh.devices.flat[0].device_kind)
        rate = self.case.causal_flops / statistics.median(seconds)
        return asdict(self.case) | dict(
            mesh=" ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1),
            seconds=statistics.median(seconds),
            seconds_min=min(seconds),
            tflops=rate / 1e12,
            share_of_peak=rate / (device.bf16_flops_per_second * self.mesh.size) if device else None,
            temp_bytes=self.compiled.memory_analysis().temp_size_in_bytes,
        )


def prepare(case: Case, mesh: Mesh) -> Contestant:
    """Our own attention."""
    config = AttentionConfig(
        strategy=case.strategy, kernel=case.kernel, window=case.window, ulysses_degree=case.ulysses_degree
    )
    attend = attention.make(config, mesh)
    return prepare_function(case, mesh, lambda q, k, v: attend(q, k, v, None, None)[0])


def prepare_function(case: Case, mesh: Mesh, attend: Callable) -> Contestant:
    """`attend(q_BTNH, k_BTKH, v_BTKH) -> out_BTNH`, on random inputs split over the mesh."""
    *qkv, dout = _inputs(case, mesh)

    def gradient(q, k, v):
        return jax.grad(lambda *qkv: (attend(*qkv) * dout).sum().astype(jnp.float32), (0, 1, 2))(q, k, v)

    compiled = jax.jit(gradient if case.backward else attend).lower(*qkv).compile()
    return Contestant(case=case, mesh=mesh, compiled=compiled, inputs=tuple(qkv))


def _inputs(case: Case, mesh: Mesh) -> tuple[jax.Array, ...]:
    """Random (q, k, v, dout); zeros would flatter a GPU."""
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES, CONTEXT, TENSOR, None))
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
    keys = jax.random.split(jax.random.key(0), len(heads))
    shapes = [(1, case.seq_len, count, case.head_dim) for count in heads]
    arrays = [jax.random.normal(key, shape, case.dtype) for key, shape in zip(keys, shapes)]
    return tuple(jax.device_put(array, sharding) for array in arrays)
