"""What the plan says about a small step, against what is known of it from its config."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc import plan
from jaxlc.config import MeshConfig, load
from jaxlc.core.errors import UserError
from jaxlc.plan.compile import place_in_memory
from jaxlc.plan.report import page
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from tests.plan.gpus import ignores_cache, needs_gpu_compiler, small_config

pytestmark = [needs_gpu_compiler, ignores_cache]
LAYERS, CONTEXT, ACCUMULATION = 2, 2, 3


@pytest.fixture(scope="module")
def found():
    """A process drives two GPUs, and the ring leads from one NVLink domain to the other."""
    config = small_config()
    config.train.update(global_batch_size=ACCUMULATION, gradient_accumulation_steps=ACCUMULATION)
    config.runtime.update(simulated_devices=4)  # which counts for nothing here
    return plan.plan(config, "h100:2x2", devices_per_process=2)


def test_the_parts_of_the_memory_add_up(found):
    memory = found.memory
    state = memory.parameters_bytes + memory.optimizer_bytes
    assert memory.optimizer_bytes == pytest.approx(2 * memory.parameters_bytes, rel=1e-3)  # two moments of Adam
    # Segment ids and positions are not read, where a row is one document.
    assert 0 < memory.device_arguments_bytes - state < 2 * memory.batch_bytes
    assert memory.device_peak_bytes == (
        memory.device_arguments_bytes + memory.device_temp_bytes + memory.workspace_bytes + memory.nccl_bytes
    )
    assert memory.symmetric_bytes == memory.host_bytes_per_node == 0
    # 130% (preset overlap) of what 80% leaves beside the arguments
    assert memory.scheduler_limit_bytes == pytest.approx(
        1.3 * (0.8 * memory.device_capacity_bytes - memory.device_arguments_bytes)
    )
    assert not memory.is_at_schedulers_limit
    assert memory.fits and memory.device_capacity_bytes > 79 * 2**30


def test_the_page_says_what_unified_memory_does(found):
    gpu_bytes = int(0.5 * found.memory.device_peak_bytes)
    large = dataclasses.replace(found.memory, device_capacity_bytes=gpu_bytes, unified_host_bytes=10 * 2**30)
    text = page(dataclasses.replace(found, memory=large), "")
    assert "and 10.00 of the host's" in text and "IT FITS" in text
    assert "of it lie in the host's memory; the predicted time does not count the way there" in text
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in text  # runtime.start sets it
    over_pcie = dataclasses.replace(found.memory, is_unified_over_pcie=True)
    assert "runtime.unified_memory is not counted" in page(dataclasses.replace(found, memory=over_pcie), "")


def test_full_recomputation_costs_a_forward(found):
    """Of the matrix products a third of the model's, but not the head's; of attention (4 + 4 + 10) / 12 in all."""
    assert 0.33 < found.predicted.recomputed_share < 0.5


def test_the_largest_arrays_have_sizes_and_makers(found):
    sizes = [each.bytes for each in found.memory.largest]
    assert len(sizes) == 5 and sizes == sorted(sizes, reverse=True)
    for each in found.memory.largest:
        dtype, dims = each.shape.rstrip("]").split("[")
        assert each.bytes == math.prod(map(int, dims.split(","))) * {"f32": 4, "bf16": 2, "s32": 4}[dtype]
        assert each.made_by
    named = [each for each in found.memory.largest if "/" in each.made_by or each.made_by.startswith("state.")]
    assert len(named) >= 4  # what the compiler makes of its own may have a name of its own


def test_the_rings_hops_are_counted_once_a_round_of_every_loop(found):
    hops = (
        ACCUMULATION
        * LAYERS
        * (
            2 * (CONTEXT - 1)  # K and V, forward and again in the backward
            + CONTEXT  # dK and dV, and home
            + CONTEXT
            - 2  # K and V beside them
        )
    )
    assert found.ring.hops == found.ring.hidden + found.ring.exposed == hops
    assert found.ring.by_backend == {"NCCL": hops}
    (row,) = (row for row in found.collectives if row.kind == "collective-permute")
    assert row.axes == ("context",) and row.crosses_domains and row.count == hops


def test_collectives_within_a_domain_do_not_cross(found):
    rows = {(row.kind, row.axes): row for row in found.collectives}
    assert not rows["all-gather", ("tensor",)].crosses_domains
    assert rows["all-gather", ("context",)].crosses_domains
    assert [row.bytes for row in found.collectives] == sorted((row.bytes for row in found.collectives), reverse=True)


def test_kernels_are_counted_by_pass(found):
    calls = ACCUMULATION * LAYERS * CONTEXT  # one at each step of the ring
    assert {name: found.kernels[f"cudnn attention {name}"] for name in ("forward", "recomputation", "backward")} == {
        "forward": calls, "recomputation": calls, "backward": calls
    }  # fmt: skip
    assert found.kernels["triton gemm"] > 0


def test_json_has_its_stable_keys(found):
    values = json.loads(json.dumps(found.to_json()))
    assert values.keys() >= {
        "topology", "num_devices", "mesh", "sequence_tokens", "tokens_per_step", "compile_seconds", "memory",
        "collectives", "ring", "kernels",
    }  # fmt: skip
    assert values["memory"].keys() >= {
        "device_capacity_bytes", "device_arguments_bytes", "device_temp_bytes", "workspace_bytes", "symmetric_bytes",
        "device_peak_bytes", "host_bytes_per_device", "host_bytes_per_node", "host_capacity_per_node_bytes", "fits",
    }  # fmt: skip
    assert values["collectives"][0].keys() == {
        "kind", "axes", "backend", "mode", "count", "bytes", "crosses_domains"
    }  # fmt: skip
    assert values["ring"].keys() == {"hops", "hidden", "exposed", "exposed_forward", "by_backend"}
    assert values["tokens_per_step"] == ACCUMULATION * values["sequence_tokens"]
    assert values["mesh"] == {"data": 1, "fsdp": 1, "context": 2, "tensor": 2}


def test_the_page_fits_a_terminal(found):
    text = page(found, "")
    assert max(map(len, text.splitlines())) <= 120
    assert "IT FITS" in str(found) and "cudnn attention forward" in text


@pytest.mark.parametrize("mesh, words", [
    (dict(context=4, tensor=2), "h100:2x2 has 4; use --config.mesh.tensor=1, or another --topology, of 8 GPUs"),
    (dict(context=3, tensor=1), "h100:2x2 has 4"),
])  # fmt: skip
def test_a_mesh_of_another_size_is_told_what_works(mesh, words):
    config = small_config()
    config.data.seq_len = 3 * 4096
    config.mesh.update(mesh)
    with pytest.raises(UserError, match=words):
        plan.plan(config, "h100:2x2")


@pytest.mark.parametrize("settings, words", [
    (dict(runtime=dict(transport="peer")), "peer copies work within one process"),
    (dict(attention=dict(kernel="cudnn", document_mask=True)), "attention kernel cudnn cannot do this"),
    (dict(data=dict(seq_len=2**40)), "seq_len=1099511627776 cannot be compiled"),
], ids=["transport", "kernel", "size"])  # fmt: skip
def test_what_cannot_be_is_one_sentence(settings, words):
    config = small_config()
    config.update(settings)
    with pytest.raises(UserError, match=words) as raised:
        plan.plan(load(config), "h100:2x2")
    assert "\n" not in str(raised.value)


def test_arguments_in_host_memory_count_as_host_memory():
    """JAX forgets where they are, as the program before the remedy shows; one argument is not read at all."""
    mesh = make_mesh(topology("h100:1x2"), MeshConfig(context=2))
    array = jax.ShapeDtypeStruct((2**20,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("context")))

    kinds, result_kinds = (None, None, "pinned_host"), (None, "pinned_host")
    shardings = tuple(NamedSharding(mesh, PartitionSpec("context"), memory_kind=kind) for kind in result_kinds)

    def host_and_device_bytes(**remedy):
        def add(_, on_device, on_host):
            moved = jax.device_put(on_host, jax.memory.Space.Device)
            return on_device + moved, jax.device_put(2 * moved, jax.memory.Space.Host)

        jitted = jax.jit(add, donate_argnums=2, out_shardings=shardings)
        lowered = jitted.lower(array, array, array)
        if remedy:
            place_in_memory(lowered, **remedy)
        memory = lowered.compile(compiler_options=dict(WITHOUT_GPU)).memory_analysis()
        return memory.host_argument_size_in_bytes, memory.argument_size_in_bytes, memory.alias_size_in_bytes

    one = 2**20 * 4 // 2  # of each device
    assert host_and_device_bytes() == (0, 2 * one, one)
    assert host_and_device_bytes(arguments=kinds, results=result_kinds) == (one, one, 0)
