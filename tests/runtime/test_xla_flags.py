import typing

import jax
import jax.numpy as jnp
import pytest

from jaxlc.config import RuntimeConfig
from jaxlc.runtime.xla_flags import PRESETS, compile_options, slop_percent, users_options
from jaxlc.simulate.topology import WITHOUT_GPU, topology

pytestmark = pytest.mark.jax_version


def test_compile_options_on_cpu_are_empty():
    options = compile_options("cpu", preset="overlap", transport=None, environment={})
    assert options == {}
    assert jax.jit(jnp.sin).lower(1.0).compile(compiler_options=options)(0.0) == 0.0


def test_presets_equal_choices_of_config():
    assert (
        set(typing.get_args(typing.get_type_hints(RuntimeConfig)["xla_preset"])) == PRESETS.keys()
    )


def test_compile_options_default_preset_overlaps_collectives():
    assert compile_options(
        "gpu", preset=RuntimeConfig().xla_preset, transport="nccl", environment={}
    ) == {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
        "xla_gpu_memory_limit_slop_factor": 130,
    }
    assert compile_options("gpu", preset="default", transport=None, environment={}) == {}


@pytest.mark.parametrize(
    ("pool_gib", "arguments_gib", "percent"),
    [(60, 10, 90), (72, 10, 112), (72, 0, 110), (76, 40, 143), (60, 64, None), (8, 9, 1)],
)
def test_slop_percent_keeps_schedule_within_the_pool(pool_gib, arguments_gib, percent):
    chosen = slop_percent(pool_gib * 2**30, 80 * 2**30, arguments_gib * 2**30)
    assert chosen == percent
    if percent not in (None, 1):
        assert arguments_gib + chosen / 100 * (0.8 * 80 - arguments_gib) <= 0.98 * pool_gib
    options = compile_options(
        "gpu",
        preset="overlap",
        transport=None,
        max_slop_percent=chosen,
        environment={"XLA_FLAGS": ""},
    )
    assert options["xla_gpu_memory_limit_slop_factor"] == min(130, percent or 130)


def test_compile_options_host_memory_copies_in_parallel():
    assert compile_options(
        "gpu", preset="default", transport=None, uses_host_memory=True, environment={}
    ) == {
        "xla_disable_hlo_passes": "rematerialization",
        "xla_gpu_experimental_parallel_async_compute_limit": 16,
    }


def test_compile_options_skip_users_xla_flags():
    """A compile option would take precedence over XLA_FLAGS."""
    flags = "--xla_gpu_collective_permute_mode=private --xla_gpu_enable_latency_hiding_scheduler"
    options = compile_options(
        "gpu", preset="overlap", transport="symmetric", environment={"XLA_FLAGS": flags}
    )
    assert not options.keys() & users_options({"XLA_FLAGS": flags}).keys()
    assert options["xla_gpu_experimental_parallel_collective_overlap_limit"] == 4


def test_users_options_last_value_takes_precedence():
    assert users_options({}) == {}
    assert users_options({"XLA_FLAGS": "--a=1 --b  --a=x=y"}) == {"a": "x=y", "b": "true"}


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_options_are_known_to_gpu_compiler(preset):
    device = topology("h100:1x1").devices[0]
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    options = compile_options(
        "gpu",
        preset=preset,
        transport="symmetric",
        uses_host_memory=True,
        is_deterministic=True,
        environment={},
    )
    assert options["xla_gpu_exclude_nondeterministic_ops"]
    jax.jit(jnp.sin).lower(x).compile(compiler_options=options | WITHOUT_GPU)
