import warnings

import jax
import jax.numpy as jnp
import pytest

from jaxlc.config import MeshConfig
from jaxlc.runtime import compilation_cache
from jaxlc.simulate.topology import WITHOUT_GPU, has_gpu_compiler, make_mesh, topology


@pytest.fixture
def cache_dir(tmp_path):
    """An empty cache directory that JAX uses instead of the usual one."""
    usual = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", usual)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def compile_for(devices) -> None:
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    options = dict(WITHOUT_GPU) if devices[0].platform == "gpu" else None
    with compilation_cache.disabled_for_absent(devices):
        jax.jit(lambda x: x @ x + 1).lower(x).compile(compiler_options=options)


def test_disabled_for_absent_keeps_the_cache_of_present_devices(cache_dir):
    compile_for(jax.devices())
    assert any(cache_dir.iterdir())
    assert jax.config.jax_enable_compilation_cache


def test_disabled_writes_no_entry_and_restores_the_cache(cache_dir):
    with compilation_cache.disabled():
        compile_for(jax.devices())
    assert not any(cache_dir.iterdir())
    compile_for(jax.devices())
    assert any(cache_dir.iterdir())


@pytest.mark.skipif(not has_gpu_compiler(), reason="needs the GPU compiler")
def test_disabled_for_absent_compiles_twice_without_warning(cache_dir):
    mesh = make_mesh(topology("h100:1x1"), MeshConfig())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            jax.clear_caches()
            compile_for(list(mesh.devices.flat))
    assert not any(cache_dir.iterdir())
