import functools

import jax
import jax.numpy as jnp
import pytest

from jaxlc import attention
from jaxlc.config import AttentionConfig, MeshConfig, RuntimeConfig
from jaxlc.core.errors import UserError
from jaxlc.hlo import analyze
from jaxlc.runtime import xla_flags
from jaxlc.runtime.xla_flags import (
    LAST_XLA_WITH_NVSHMEM,
    TransportEnvironment,
    choose,
    choose_for,
    compile_options,
    prepare,
    unsupported,
    xla_version,
)
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from tests.advice import followed

pytestmark = pytest.mark.jax_version

NVSHMEM_IS_GONE = xla_version() > LAST_XLA_WITH_NVSHMEM
# Supports NVSHMEM and one-sided NCCL.
ENVIRONMENT = TransportEnvironment(
    num_processes=8,
    devices_per_process=1,
    xla_version=(0, 10, 1),
    nccl_version=(2, 29, 3),
    has_nvshmem=True,
    is_nvshmem_started=True,
)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "nvshmem",
            dict(xla_version=(0, 10, 2)),
            ["JAX 0.10.2 has no NVSHMEM", "pip install -e '.[nvshmem]'"],
        ),
        ("nvshmem", dict(xla_version=(0, 12, 0, 1)), ["JAX 0.12.0.1 has no NVSHMEM"]),
        ("nvshmem", dict(devices_per_process=4), ["one process per GPU", "a process has 4 GPUs"]),
        (
            "nvshmem",
            dict(has_nvshmem=False),
            ["libnvshmem_host.so.3", "pip install nvidia-nvshmem-cu12"],
        ),
        (
            "nvshmem",
            dict(is_nvshmem_started=False),
            ["restart Python", "jaxlc.runtime.start.start(config.runtime)"],
        ),
        ("symmetric", dict(nccl_version=(2, 28, 9)), ["NCCL 2.29", "2.28.9", "nvidia-nccl-cu12"]),
        ("symmetric", dict(nccl_version=None), ["libnccl.so.2 is not installed"]),
        ("peer", dict(), ["one process", "8"]),
    ],
)
def test_choose_unsupported_transport_is_refused_with_reason(name, change, words):
    environment = ENVIRONMENT._replace(**change)
    error = followed(
        lambda settings: choose_for(settings.get("runtime.transport", name), environment)
    )
    for word in [f"config.runtime.transport={name!r} is unsupported: ", *words]:
        assert word in error


@pytest.mark.parametrize("name", ["nccl", "nvshmem", "symmetric"])
def test_choose_named_transport_is_selected(name):
    assert choose_for(name, ENVIRONMENT).name == name


def test_choose_peer_in_one_process_is_selected():
    assert (
        choose_for("peer", ENVIRONMENT._replace(num_processes=1, devices_per_process=8)).name
        == "peer"
    )


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        (dict(), "nvshmem"),
        (dict(devices_per_process=2), "nccl"),
        (dict(xla_version=(0, 12, 0, 1)), "nccl"),  # not symmetric, although it is supported
        (dict(xla_version=(0, 12, 0, 1), nccl_version=(2, 27, 7)), "nccl"),
        (dict(num_processes=1, devices_per_process=8), "nccl"),
    ],
)
def test_choose_auto_selects_first_supported(change, chosen):
    environment = ENVIRONMENT._replace(**change)
    selection = choose_for("auto", environment)
    assert (selection.name, selection.is_auto) == (chosen, True)
    if environment.num_processes > 1 and chosen != "nvshmem":
        assert f"not nvshmem: {unsupported('nvshmem', environment)}" in selection.reason


@pytest.fixture
def library(tmp_path, monkeypatch):
    """NVSHMEM in a pip package."""
    directory = tmp_path / "nvidia" / "nvshmem" / "lib"
    directory.mkdir(parents=True)
    (directory / "libnvshmem_host.so.3").touch()
    (directory / "nvshmem_bootstrap_uid.so.3").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(xla_flags, "xla_version", lambda: (0, 10, 1))
    return directory / "libnvshmem_host.so.3"


def prepared(config: RuntimeConfig, **environment: str) -> dict[str, str]:
    environment = {"CUDA_VISIBLE_DEVICES": "3"} | environment
    prepare(config, environment)
    return environment


def test_prepare_nvshmem_sets_its_variables(library):
    environment = prepared(
        RuntimeConfig(transport="nvshmem", num_processes=8, nvshmem_heap_bytes=2**31)
    )
    assert environment["XLA_FLAGS"] == "--xla_gpu_experimental_enable_nvshmem=true"
    assert environment["NVSHMEM_SYMMETRIC_SIZE"] == "2147483648"
    assert environment["NVSHMEM_BOOTSTRAP_UID_PLUGIN"] == str(
        library.with_name("nvshmem_bootstrap_uid.so.3")
    )
    assert prepared(RuntimeConfig(num_processes=8))["XLA_FLAGS"] == environment["XLA_FLAGS"]  # auto


def test_prepare_users_variables_take_precedence(library):
    users_variables = dict(
        XLA_FLAGS="--xla_gpu_experimental_enable_nvshmem=false --xla_dump_to=there",
        NVSHMEM_SYMMETRIC_SIZE="1G",
        NVSHMEM_BOOTSTRAP_UID_PLUGIN="mine.so",
    )
    environment = prepared(
        RuntimeConfig(transport="nvshmem", num_processes=8, nvshmem_heap_bytes=2**31),
        **users_variables,
    )
    assert {name: environment[name] for name in users_variables} == users_variables


@pytest.mark.parametrize(
    ("config", "visible", "version"),
    [
        (RuntimeConfig(transport="nccl", num_processes=8), "0", (0, 10, 1)),
        (RuntimeConfig(), "0", (0, 10, 1)),
        (RuntimeConfig(transport="nvshmem", num_processes=8), "0,1", (0, 10, 1)),  # XLA would abort
        # XLA would abort: an unknown flag
        (RuntimeConfig(transport="nvshmem", num_processes=8), "0", (0, 12, 0, 1)),
    ],
)
def test_prepare_without_nvshmem_sets_nothing(config, visible, version, library, monkeypatch):
    monkeypatch.setattr(xla_flags, "xla_version", lambda: version)
    assert prepared(config, CUDA_VISIBLE_DEVICES=visible) == {"CUDA_VISIBLE_DEVICES": visible}


def test_choose_on_cpu_refuses_gpu_transport():
    devices = jax.devices()
    assert choose(RuntimeConfig(), devices) is None
    assert choose(RuntimeConfig(transport="nvshmem", simulated_devices=8), devices) is None
    error = followed(
        lambda settings: choose(
            RuntimeConfig(transport=settings.get("runtime.transport", "nvshmem")), devices
        )
    )
    assert "'nvshmem' is unsupported: it needs GPUs and the platform is cpu" in error


@functools.cache
def compiled_transports(name: str, devices_per_process: int) -> set[tuple[str, str]]:
    """(backend, mode) of the sends of a small ring, compiled for four H100s with a named transport."""
    mesh = make_mesh(
        topology("h100:1x4", devices_per_process=devices_per_process), MeshConfig(context=4)
    )
    attend = attention.make(AttentionConfig(kernel="blockwise"), mesh)
    x_BTNH, ids_BT = (
        jax.ShapeDtypeStruct((1, 1024, 2, 32), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 1024), jnp.int32),
    )
    options = compile_options("gpu", preset="overlap", transport=name, environment={}) | WITHOUT_GPU

    def attend_packed(q_BTNH, k_BTKH, v_BTKH, positions_BT, segments_BT):
        return attend(q_BTNH, k_BTKH, v_BTKH, attend.prepare(positions_BT, segments_BT))

    compiled = (
        jax.jit(attend_packed)
        .lower(x_BTNH, x_BTNH, x_BTNH, ids_BT, ids_BT)
        .compile(compiler_options=options)
    )
    sends = [c for c in analyze(compiled.as_text()).collectives if c.kind == "collective-permute"]
    return {(send.backend, send.mode) for send in sends}


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("auto", ("DEFAULT", "") if NVSHMEM_IS_GONE else ("NVSHMEM", "")),
        ("nccl", ("DEFAULT", "")),
        ("nvshmem", ("NVSHMEM", "")),
        ("symmetric", ("DEFAULT", "COLLECTIVES_SYMMETRIC_MEMORY")),
        ("peer", ("DEFAULT", "COLLECTIVES_PEER_MEMORY")),
    ],
)
def test_compiled_ring_uses_selected_transport(name, transport):
    devices_per_process = 4 if name == "peer" else 1
    devices = topology("h100:1x4", devices_per_process=devices_per_process).devices
    if name == "nvshmem" and NVSHMEM_IS_GONE:
        with pytest.raises(UserError, match="has no NVSHMEM"):
            choose(RuntimeConfig(transport=name), devices)
    else:
        selection = choose(RuntimeConfig(transport=name), devices)
        assert compiled_transports(selection.name, devices_per_process) == {transport}
