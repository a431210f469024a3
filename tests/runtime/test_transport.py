import importlib.util

import jax
import jax.numpy as jnp
import pytest

from jaxlc import attention
from jaxlc.config import AttentionConfig, MeshConfig, RuntimeConfig
from jaxlc.core.errors import UserError
from jaxlc.hlo import parse
from jaxlc.hlo.collectives import collectives
from jaxlc.runtime import transport
from jaxlc.runtime.plugin import xla_version
from jaxlc.runtime.transport import Place, choose, choose_for, prepare, unavailable
from jaxlc.runtime.xla_flags import LAST_XLA_WITH_NVSHMEM, compile_options
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology

needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason='needs the GPU compiler: pip install "jaxlc[plan]"'
)
NVSHMEM_IS_GONE = xla_version() > LAST_XLA_WITH_NVSHMEM
# All that NVSHMEM and one-sided NCCL need.
GOOD = Place(
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
        ("nvshmem", dict(xla_version=(0, 10, 2)), ["0.10.2 does not have NVSHMEM", 'pip install "jaxlc[nvshmem]"']),
        ("nvshmem", dict(xla_version=(0, 12, 0, 1)), ["0.12.0.1 does not have NVSHMEM"]),
        ("nvshmem", dict(devices_per_process=4), ["a process for each GPU", "4 GPUs in one"]),
        ("nvshmem", dict(has_nvshmem=False), ["libnvshmem_host.so.3", "pip install nvidia-nvshmem-cu12"]),
        ("nvshmem", dict(is_nvshmem_started=False), ["restart Python", "jaxlc.runtime.start(config.runtime)"]),
        ("symmetric", dict(nccl_version=(2, 28, 9)), ["NCCL 2.29", "2.28.9", "nvidia-nccl-cu12"]),
        ("symmetric", dict(nccl_version=None), ["no libnccl.so.2"]),
        ("peer", dict(), ["one process", "8"]),
    ],
)
def test_a_named_transport_that_cannot_be_is_refused_with_the_reason(name, change, words):
    with pytest.raises(UserError) as error:
        choose_for(name, GOOD._replace(**change))
    for word in [f"config.runtime.transport={name!r}", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["nccl", "nvshmem", "symmetric"])
def test_named_transports_between_processes(name):
    assert choose_for(name, GOOD).name == name


def test_peer_within_one_process():
    assert choose_for("peer", GOOD._replace(num_processes=1, devices_per_process=8)).name == "peer"


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        (dict(), "nvshmem"),
        (dict(devices_per_process=2), "symmetric"),
        (dict(xla_version=(0, 12, 0, 1)), "symmetric"),
        (dict(xla_version=(0, 12, 0, 1), nccl_version=(2, 27, 7)), "nccl"),
        (dict(num_processes=1, devices_per_process=8), "nccl"),
    ],
)
def test_auto_takes_the_best_that_will_really_be_used(change, chosen):
    place = GOOD._replace(**change)
    choice = choose_for("auto", place)
    assert (choice.name, choice.is_auto) == (chosen, True)
    if place.num_processes > 1 and chosen != "nvshmem":
        assert f"not nvshmem: {unavailable('nvshmem', place)}" in choice.reason


@pytest.fixture
def library(tmp_path, monkeypatch):
    """NVSHMEM as pip installs it."""
    directory = tmp_path / "nvidia" / "nvshmem" / "lib"
    directory.mkdir(parents=True)
    (directory / "libnvshmem_host.so.3").touch()
    (directory / "nvshmem_bootstrap_uid.so.3").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(transport, "xla_version", lambda: (0, 10, 1))
    return directory / "libnvshmem_host.so.3"


def prepared(config: RuntimeConfig, **environment: str) -> dict[str, str]:
    environment = {"CUDA_VISIBLE_DEVICES": "3"} | environment
    prepare(config, environment)
    return environment


def test_what_nvshmem_reads_at_its_start(library):
    environment = prepared(RuntimeConfig(transport="nvshmem", num_processes=8, nvshmem_heap_bytes=2**31))
    assert environment["XLA_FLAGS"] == "--xla_gpu_experimental_enable_nvshmem=true"
    assert environment["NVSHMEM_SYMMETRIC_SIZE"] == "2147483648"
    assert environment["NVSHMEM_BOOTSTRAP_UID_PLUGIN"] == str(library.with_name("nvshmem_bootstrap_uid.so.3"))
    assert prepared(RuntimeConfig(num_processes=8))["XLA_FLAGS"] == environment["XLA_FLAGS"]  # auto


def test_what_the_user_has_set_stays(library):
    own = dict(
        XLA_FLAGS="--xla_gpu_experimental_enable_nvshmem=false --xla_dump_to=there",
        NVSHMEM_SYMMETRIC_SIZE="1G",
        NVSHMEM_BOOTSTRAP_UID_PLUGIN="mine.so",
    )
    environment = prepared(RuntimeConfig(transport="nvshmem", num_processes=8, nvshmem_heap_bytes=2**31), **own)
    assert {name: environment[name] for name in own} == own


@pytest.mark.parametrize(
    ("config", "visible", "version"),
    [
        (RuntimeConfig(transport="nccl", num_processes=8), "0", (0, 10, 1)),
        (RuntimeConfig(), "0", (0, 10, 1)),
        (RuntimeConfig(transport="nvshmem", num_processes=8), "0,1", (0, 10, 1)),  # XLA would abort
        (RuntimeConfig(transport="nvshmem", num_processes=8), "0", (0, 12, 0, 1)),  # and here too: an unknown flag
    ],
)
def test_nothing_is_set_where_nvshmem_is_not_wanted_or_cannot_be(config, visible, version, library, monkeypatch):
    monkeypatch.setattr(transport, "xla_version", lambda: version)
    assert prepared(config, CUDA_VISIBLE_DEVICES=visible) == {"CUDA_VISIBLE_DEVICES": visible}


def test_on_cpu():
    devices = jax.devices()
    assert choose(RuntimeConfig(), devices) is None
    assert choose(RuntimeConfig(transport="nvshmem", simulated_devices=8), devices) is None
    with pytest.raises(UserError, match="'nvshmem' is for GPUs, and the devices here are of cpu"):
        choose(RuntimeConfig(transport="nvshmem"), devices)


def compiled_hops(name: str) -> set[tuple[str, str]]:
    """(backend, mode) of the hops of a small ring on four H100s."""
    gpus = topology("h100:1x4", devices_per_process=4 if name == "peer" else 1)
    mesh = make_mesh(gpus, MeshConfig(context=4))
    choice = choose(RuntimeConfig(transport=name), tuple(mesh.devices.flat))
    attend = attention.make(AttentionConfig(kernel="blockwise"), mesh)
    x_BTNH, row_BT = jax.ShapeDtypeStruct((1, 1024, 2, 32), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    options = compile_options("gpu", preset="overlap", transport=choice.name, environment={}) | WITHOUT_GPU
    compiled = jax.jit(attend).lower(x_BTNH, x_BTNH, x_BTNH, row_BT, row_BT).compile(compiler_options=options)
    sent = collectives(parse(compiled.as_text()))
    return {(each.backend, each.mode) for each in sent if each.kind == "collective-permute"}


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("auto", ("DEFAULT", "COLLECTIVES_SYMMETRIC_MEMORY") if NVSHMEM_IS_GONE else ("NVSHMEM", "")),
        ("nccl", ("DEFAULT", "")),
        ("nvshmem", ("NVSHMEM", "")),
        ("symmetric", ("DEFAULT", "COLLECTIVES_SYMMETRIC_MEMORY")),
        ("peer", ("DEFAULT", "COLLECTIVES_PEER_MEMORY")),
    ],
)
def test_every_hop_of_the_program_for_h100s_has_the_transport(name, found):
    if name == "nvshmem" and NVSHMEM_IS_GONE:
        with pytest.raises(UserError, match="does not have NVSHMEM any more"):
            compiled_hops(name)
    else:
        assert compiled_hops(name) == {found}
