import dataclasses
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from jaxlc.config import defaults, load
from jaxlc.core.errors import UserError
from jaxlc.hlo import analyze
from jaxlc.runtime.xla_flags import TransportSelection
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from jaxlc.step.step import build_step
from jaxlc.step.verify_compiled import describe, mismatch, verify_compiled_step, verify_evaluation
from tests.hlo.snippets import RING

pytestmark = pytest.mark.jax_version

NVSHMEM = TransportSelection("nvshmem", "named in the config", is_auto=False)
ALL_NCCL = RING.replace('"NVSHMEM"', '"DEFAULT"')


def compiled(text: str) -> SimpleNamespace:
    return SimpleNamespace(as_text=lambda: text)


def step(transport: TransportSelection | None, mismatch_is: str = "error") -> SimpleNamespace:
    config = defaults()
    config.model.num_layers = 3
    config.runtime.transport_mismatch = mismatch_is
    return SimpleNamespace(
        config=load(config), transport=transport, abstract_state=(), memory_spaces=(), model=None
    )


def small_ring(num_layers: int) -> ConfigDict:
    config = defaults()
    config.model.update(
        num_layers=num_layers, model_dim=64, num_heads=2, num_kv_heads=2, ffn_dim=64
    )
    config.mesh.context = 4
    config.attention.kernel = "blockwise"
    config.data.seq_len = 512
    return config


def test_describe_counts_hops_and_transports():
    """Of two hops in a loop of three iterations one uses NVSHMEM and is overlapped; see the
    snippet.
    """
    assert describe(analyze(RING).attention_collectives, strategy="ring", num_layers=3) == [
        "ring: 6 hops (2 x 3 layers), 3 NVSHMEM and 3 NCCL; unoverlapped: 3 of 6 forward"
    ]
    assert describe(analyze(ALL_NCCL).attention_collectives, strategy="ring", num_layers=4) == [
        "ring: 6 hops, all NCCL; unoverlapped: 3 of 6 forward"
    ]
    assert describe([], strategy="ring", num_layers=3) == ["ring: nothing to send"]


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("COLLECTIVES_SYMMETRIC_MEMORY", "one-sided NCCL"),
        ("COLLECTIVES_PEER_MEMORY", "peer copies"),
    ],
)
def test_describe_names_nccl_modes(mode, name):
    (line,) = describe(
        analyze(ALL_NCCL.replace('"X"', f'"{mode}"')).attention_collectives,
        strategy="ring",
        num_layers=3,
    )
    assert f"3 {name} and 3 NCCL" in line


def test_verify_with_other_transport_raises():
    with pytest.raises(UserError) as error:
        verify_compiled_step(step(NVSHMEM), compiled(RING))
    for words in [
        "of 6 hops the compiled step sends 3 by NCCL",
        "transport is 'nvshmem'",
        "transport_mismatch=warn",
    ]:
        assert words in str(error.value)


def test_verify_with_other_transport_and_warn_returns_warning():
    lines = verify_compiled_step(step(NVSHMEM, "warn"), compiled(RING))
    assert lines[-1].startswith("warning: of 6 hops") and len(lines) == 2


def test_verify_with_auto_transport_checks_its_choice():
    with pytest.raises(UserError, match="transport chose 'nvshmem'"):
        verify_compiled_step(step(NVSHMEM._replace(is_auto=True)), compiled(ALL_NCCL))


def test_verify_with_requested_transport_returns_one_line():
    (line,) = verify_compiled_step(
        step(TransportSelection("nccl", "auto; one process", is_auto=True)), compiled(ALL_NCCL)
    )
    assert "all NCCL" in line


def test_mismatch_of_strategy_without_hops():
    text = ALL_NCCL.replace("collective-permute", "all-gather").replace(
        "source_target_pairs", "replica_groups"
    )
    gathers = analyze(text).attention_collectives
    assert gathers
    assert "makes no hops" in mismatch(gathers, NVSHMEM, strategy="all_gather")
    assert mismatch(gathers, NVSHMEM._replace(is_auto=True), strategy="all_gather") is None
    assert mismatch([], NVSHMEM, strategy="ring") is None


def test_verify_on_cpu_returns_nothing():
    assert verify_compiled_step(step(None), compiled("not parsed on CPU")) == []


@pytest.mark.gpu_compiler
def test_evaluation_for_h100_uses_the_transport_of_the_step():
    config = small_ring(num_layers=1)
    config.runtime.transport = "symmetric"
    config = load(config)
    mesh = make_mesh(topology("h100:1x4"), config.mesh)
    real = build_step(config, mesh)
    compiled = real.compile_lowered(real.lower_evaluation(), dict(WITHOUT_GPU))
    assert {
        hop.collective.transport for hop in analyze(compiled.as_text()).attention_collectives
    } == {"symmetric"}
    verify_evaluation(real, compiled)
    by_nccl = dataclasses.replace(
        config, runtime=dataclasses.replace(config.runtime, transport="nccl")
    )
    with pytest.raises(UserError, match="hops the compiled step sends . by one-sided NCCL"):
        verify_evaluation(build_step(by_nccl, mesh), compiled)


@pytest.mark.gpu_compiler
@pytest.mark.heavy
def test_verify_step_compiled_for_h100_describes_hops():
    config = small_ring(num_layers=2)
    config = load(config)
    real = build_step(config, make_mesh(topology("h100:1x4"), config.mesh))
    lines = verify_compiled_step(real, real.compile(extra_options=dict(WITHOUT_GPU)))
    name = {"nvshmem": "NVSHMEM", "nccl": "NCCL"}[real.transport.name]
    assert lines[0].startswith("ring: ") and f" x 2 layers), all {name}; unoverlapped: " in lines[0]
