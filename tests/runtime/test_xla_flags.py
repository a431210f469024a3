import jax
import jax.numpy as jnp

from jaxlc.runtime.xla_flags import compile_options


def test_cpu_takes_its_options():
    compiled = jax.jit(jnp.sin).lower(1.0).compile(compiler_options=compile_options("cpu"))
    assert compiled(0.0) == 0.0


def test_gpu_hides_collectives_and_cpu_knows_nothing_of_it():
    assert compile_options("cpu") == {}
    assert compile_options("gpu") == {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    }
