"""The plan of a small step, compared with values that follow from its config."""

import dataclasses
import json
import math
import re
import tempfile

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.colors import to_hex

from jaxlc import plan
from jaxlc.config import MeshConfig, load
from jaxlc.core.errors import UserError
from jaxlc.core.plot_style import RED
from jaxlc.plan import Plan
from jaxlc.plan.report import Change, page
from jaxlc.plan.result import StagePlan, StagesPlan, hints
from jaxlc.simulate.roofline import range_text
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from jaxlc.step.step import TrainStep, build_step
from jaxlc.step.verify_compiled import place_in_memory
from tests.plan.gpus import small_config

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.jax_version]
LAYERS, CONTEXT, ACCUMULATION = 2, 2, 3
GIB = 2**30


@pytest.fixture(scope="module")
def result():
    """Two GPUs per process; the ring crosses NVLink domains."""
    config = small_config()
    config.train.update(global_batch_size=ACCUMULATION, gradient_accumulation_steps=ACCUMULATION)
    config.runtime.update(simulated_devices=8)  # ignored by the plan
    return plan.plan(config, "h100:2x2", devices_per_process=2)


def test_memory_parts_add_up_to_peak(result):
    memory = result.memory
    state = memory.parameters_bytes + memory.optimizer_bytes
    # two moments of Adam
    assert memory.optimizer_bytes == pytest.approx(2 * memory.parameters_bytes, rel=1e-3)
    # Segment ids and positions are unused with one document per sequence, and no part of the batch.
    assert 0 <= memory.device_arguments_bytes - state - memory.batch_bytes < 64  # counters
    assert memory.device_peak_bytes == (
        memory.device_arguments_bytes
        + memory.device_temp_bytes
        + memory.workspace_bytes
        + memory.nccl_bytes
    )
    assert memory.symmetric_bytes == memory.host_bytes_per_node == 0
    # 110% instead of the preset's 130% of (80% of the capacity minus the arguments): what JAX's
    # pool of 90% holds.
    assert memory.scheduler_limit_bytes == pytest.approx(
        1.1 * (0.8 * memory.device_capacity_bytes - memory.device_arguments_bytes)
    )
    scheduled_bytes = memory.scheduler_limit_bytes + memory.device_arguments_bytes
    assert scheduled_bytes <= 0.98 * 0.9 * memory.device_capacity_bytes
    assert not memory.is_at_schedulers_limit
    assert memory.fits and memory.device_capacity_bytes > 79 * 2**30


def test_page_explains_unified_memory(result):
    gpu_bytes = int(0.5 * result.memory.device_peak_bytes)
    large = dataclasses.replace(
        result.memory, device_capacity_bytes=gpu_bytes, unified_host_bytes=10 * 2**30
    )
    text = page(dataclasses.replace(result, memory=large), "")
    assert "+ 10.00 of host memory" in text and "VERDICT: fits" in text
    assert "of that are in host memory; the estimated time does not include these accesses" in text
    # runtime.start sets the pool's size from the memory of the host
    assert "runtime.memory_fraction" not in text
    over_pcie = dataclasses.replace(result.memory, is_unified_over_pcie=True)
    assert "runtime.unified_memory is ignored" in page(
        dataclasses.replace(result, memory=over_pcie), ""
    )


def test_page_names_the_settings_of_both_pools(result):
    pool_bytes, memory = result.memory.pool_bytes, result.memory
    assert "runtime.memory_fraction" not in page(result, "")
    tight = dataclasses.replace(memory, device_capacity_bytes=int(pool_bytes / 0.92), nccl_bytes=0)
    text = page(dataclasses.replace(result, memory=tight), "")
    assert (
        "Set --config.runtime.memory_fraction=0.95: the step needs more than 0.9 of a GPU's memory"
        in text
    )
    crowded = dataclasses.replace(memory, nccl_bytes=memory.device_capacity_bytes // 10)
    text = page(dataclasses.replace(result, memory=crowded), "")
    assert (
        "Set --config.runtime.memory_fraction=0.85: buffers outside of JAX's pool need the rest"
        in text
    )
    pinned = dataclasses.replace(
        memory, host_bytes_per_device=70 * 2**30, host_pool_bytes=64 * 2**30
    )
    text = page(dataclasses.replace(result, memory=pinned), "")
    assert (
        "70.00  in a pool of 64.00 (runtime.pinned_host_gib)" in text
        and "VERDICT: does not fit, 6.00 GiB" in text
    )
    assert "set --config.runtime.pinned_host_gib=71." in text
    assert dataclasses.replace(pinned, host_pool_bytes=71 * 2**30).fits
    pools = dataclasses.replace(
        memory, host_pool_bytes=200 * 2**30, host_pools_per_node_bytes=2400 * 2**30
    )
    text = page(dataclasses.replace(result, memory=pools), "")
    assert (
        "2,400.00  up to 200.00 per GPU, and 16.00 per process for staging" in text
        and "VERDICT: fits" in text
    )
    staged = f"{2400 + pools.staging_bytes_per_node / 2**30:,.2f}"
    expected = (
        f"WARNING: the pools of pinned host memory and a checkpoint may need {staged}"
        " GiB of a node, and 1,843.20"
    )
    assert expected in " ".join(text.split())


def test_recomputed_share_of_full_remat_is_one_forward(result):
    """A third of the matrix products, without the head's; attention has (4 + 4 + 10) / 12 of its
    FLOPs in total.
    """
    assert 0.33 < result.predicted.recomputed_share < 0.5


def test_largest_arrays_have_sizes_and_makers(result):
    sizes = [tensor.bytes for tensor in result.memory.largest]
    assert len(sizes) == 5 and sizes == sorted(sizes, reverse=True)
    for tensor in result.memory.largest:
        dtype, dims = tensor.shape.rstrip("]").split("[")
        assert (
            tensor.bytes
            == math.prod(map(int, dims.split(","))) * {"f32": 4, "bf16": 2, "s32": 4}[dtype]
        )
        assert tensor.made_by
    makers = [tensor.made_by for tensor in result.memory.largest]
    # the compiler names its own arrays
    assert sum("/" in maker or maker.startswith("state.") for maker in makers) >= 4


def test_ring_counts_permutes_of_all_loop_rounds(result):
    hops = (
        ACCUMULATION
        * LAYERS
        * (
            2 * (CONTEXT - 1)  # K and V, in the forward pass and in the recomputation
            + CONTEXT  # dK and dV, including the last send back to the owner rank
            + CONTEXT
            - 2  # K and V in the backward pass
        )
    )
    assert result.ring.hops == result.ring.hidden + result.ring.exposed == hops
    assert result.ring.by_backend == {"NCCL": hops}
    (permutes,) = (stats for stats in result.collectives if stats.kind == "collective-permute")
    assert permutes.axes == ("context",) and permutes.crosses_domains and permutes.count == hops


@pytest.mark.full  # test_parity.py has the program before it is compiled
def test_ring_of_latents_sends_them_and_in_the_backward_pass_their_gradients_in_float32():
    config = small_config()
    config.model.update(
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=192,
        rope_fraction=1 / 3,
        layer_kinds=("latent",),
        latent=dict(rank=512, value_dim=128),
    )
    config.mesh.update(context=4, tensor=1)
    result = plan.plan(config, "h100:1x4")
    assert result.ring.token_bytes["forward"] == ((512 + 64) * 2,)
    assert result.ring.token_bytes["backward"] == ((512 + 64) * 2, (512 + 64) * 4)
    assert "  bytes a token, backward 1,152 + 2,304\n" in str(result)
    assert result.predicted.expansion_seconds > 0 and "  expansion  " in str(result)


def test_collectives_within_a_domain_do_not_cross(result):
    by_axes = {(stats.kind, stats.axes): stats for stats in result.collectives}
    assert not by_axes["all-gather", ("tensor",)].crosses_domains
    assert by_axes["all-gather", ("context",)].crosses_domains
    sizes = [stats.bytes for stats in result.collectives]
    assert sizes == sorted(sizes, reverse=True)


def test_kernels_are_counted_by_pass(result):
    calls = ACCUMULATION * LAYERS * CONTEXT  # one per ring step
    assert {name: result.kernels[f"cudnn attention {name}"] for name in ("forward", "recomputation", "backward")} == {
        "forward": calls, "recomputation": calls, "backward": calls
    }  # fmt: skip
    assert result.kernels["triton gemm"] > 0
    operations, launches, graphs, synchronizations = result.launches
    assert (
        0 < graphs < launches < operations
        and operations > sum(result.kernels.values())
        and synchronizations == 0
    )
    assert (
        f"  GPU operations {operations:,}, host launches {launches:,} ({graphs:,} CUDA graphs)"
        in str(result)
    )


def test_to_json_has_stable_keys(result):
    values = json.loads(json.dumps(result.to_json()))
    assert values.keys() >= {
        "topology", "num_devices", "mesh", "sequence_tokens", "tokens_per_step", "compile_seconds", "memory",
        "collectives", "ring", "kernels", "config", "layer_timeline",
    }  # fmt: skip
    assert values["memory"].keys() >= {
        "device_capacity_bytes", "device_arguments_bytes", "device_temp_bytes", "workspace_bytes", "symmetric_bytes",
        "device_peak_bytes", "host_bytes_per_device", "host_bytes_per_node", "host_capacity_per_node_bytes", "fits",
    }  # fmt: skip
    assert values["collectives"][0].keys() == {
        "kind", "axes", "backend", "mode", "count", "bytes", "crosses_domains"
    }  # fmt: skip
    assert values["launches"] == result.launches._asdict()
    assert values["layer_timeline"][0].keys() == {
        "pass_name",
        "lane",
        "kind",
        "start_seconds",
        "end_seconds",
    }
    assert values["ring"].keys() == {
        "hops",
        "hidden",
        "exposed",
        "exposed_forward",
        "by_backend",
        "token_bytes",
    }
    assert values["tokens_per_step"] == ACCUMULATION * values["sequence_tokens"]
    assert values["mesh"] == {"data": 1, "fsdp": 1, "context": 2, "tensor": 2}


def test_from_json_restores_the_plan(result, tmp_path):
    change = Change(
        overrides="--a=b", cost="time", device_peak_bytes=1, host_bytes_per_node=2, fits=True
    )
    for plan_ in (result, dataclasses.replace(result, advice=(change,), hints=("use more",))):
        values = json.loads(json.dumps(plan_.to_json()))
        assert Plan.from_json(values) == plan_
        assert Plan.from_json(values | {"unknown": 1}).to_json() == plan_.to_json()
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(values))
        assert Plan.from_json(path) == Plan.from_json(str(path)) == plan_
        del values["memory"]["nccl_bytes"]
        path.write_text(json.dumps(values))
        with pytest.raises(
            UserError, match=r"invalid plan: .*plan.json .*nccl_bytes.*write it again"
        ):
            Plan.from_json(path)
    with pytest.raises(UserError, match="cannot read the plan"):
        Plan.from_json(tmp_path / "missing.json")


def test_plan_records_config_and_timeline(result):
    assert result.config["mesh"] == {"data": 1, "fsdp": 1, "context": 2, "tensor": 2}
    assert "data" not in result.config  # paths of this machine
    passes = [event.pass_name for event in result.layer_timeline]
    assert passes == sorted(passes, reverse=True) and set(passes) == {"forward", "backward"}
    layers = 0.0
    for pass_name in set(passes):
        lanes = {event.lane for event in result.layer_timeline if event.pass_name == pass_name}
        assert lanes == {"kernels", "NVLink", "network"}
        layers += max(
            event.end_seconds for event in result.layer_timeline if event.pass_name == pass_name
        )
    assert 0 < ACCUMULATION * LAYERS * layers < result.predicted.step_seconds


def test_repr_has_two_lines_with_verdict_and_estimate(result):
    first, second = repr(result).splitlines()
    assert first == "<Plan: tiny, 4,096 tokens on h100:2x2, context=2 x tensor=2;"
    assert second.startswith(" estimated: about ") and "; fits, " in second


def test_transfer_seconds_add_up_to_communication(result):
    by_link = result.predicted.transfer_seconds_by_resource
    assert by_link.keys() == {"NVLink", "network"}
    assert sum(by_link.values()) == pytest.approx(result.predicted.communication_seconds)


def test_memory_figure_bars_add_up_to_peak(result):
    (axes,) = result.memory_figure().axes
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(
        result.memory.device_peak_bytes / GIB, abs=2e-3
    )
    assert axes.lines[0].get_xdata()[0] == result.memory.usable_bytes / GIB
    assert "free" in axes.get_title(loc="left")
    full = dataclasses.replace(result.memory, device_temp_bytes=90 * GIB)
    (axes,) = dataclasses.replace(result, memory=full).memory_figure().axes
    assert "too much" in axes.get_title(loc="left") and axes.get_xlim()[1] > 90


def test_memory_figure_shows_host_memory_if_used(result):
    used = dict(
        host_bytes_per_device=GIB, host_bytes_per_node=4 * GIB, host_optimizer_bytes=GIB // 2
    )
    memory = dataclasses.replace(result.memory, staging_bytes_per_node=GIB, **used)
    _, host = dataclasses.replace(result, memory=memory).memory_figure().axes
    widths = {bar.get_label().rpartition(" ")[0]: bar[0].get_width() for bar in host.containers}
    assert widths == {"optimizer state": 2, "gradients and activations": 2, "checkpoint staging": 1}
    memory = dataclasses.replace(memory, host_pools_per_node_bytes=3000 * GIB)  # 4 of them are used
    _, host = dataclasses.replace(result, memory=memory).memory_figure().axes
    assert "rest of the pools 2,996.00" in [bar.get_label() for bar in host.containers]
    assert "too much" in host.get_title(loc="left")


def test_links_figure_has_all_bytes_and_exposed_seconds(result):
    sent, seconds = result.links_figure().axes
    gib = sum(stats.bytes for stats in result.collectives) / GIB
    assert sum(bar.get_width() for bar in sent.patches) == pytest.approx(gib)
    assert [label.get_text() for label in seconds.get_yticklabels()] == ["NVLink", "network"]
    exposed = [bar.get_width() for bar in seconds.patches if to_hex(bar.get_facecolor()) == RED]
    predicted = result.predicted
    assert sum(exposed) == pytest.approx(
        predicted.interval.median * predicted.exposed_communication_seconds
    )


def test_html_page_has_verdict_figures_and_no_external_resources(result, tmp_path):
    result.save(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert text.startswith("<!doctype html>") and text.count("<svg") == 3
    assert ">fits</span>" in text and "estimated: about" in text and "VERDICT: fits" in text
    assert "<script" not in text and "@import" not in text and "src=" not in text
    links = set(re.findall(r'href="([^"]*)"', text)) | set(re.findall(r"url\(([^)]*)\)", text))
    assert all(link.startswith("#") for link in links)
    assert (
        result._repr_html_() in text and '<meta name="viewport" content="width=device-width' in text
    )
    assert "stroke: #000000" not in text  # invisible in dark mode
    with pytest.raises(UserError, match="cannot write the plan to"):
        result.save(tmp_path / "missing" / "plan.html")


def test_html_page_has_cost_and_warnings(result, tmp_path):
    pools = dict(host_pool_bytes=200 * GIB, host_pools_per_node_bytes=12 * 200 * GIB)
    warned = dataclasses.replace(result, memory=dataclasses.replace(result.memory, **pools))
    stages = StagesPlan(
        stages=(StagePlan(name="", num_steps=1000, plan=warned),), price_per_gpu_hour=2.5
    )
    warned.save(tmp_path / "plan.html", stages.totals())
    text = (tmp_path / "plan.html").read_text()
    cost = 2.5 * stages.stages[0].gpu_hours
    assert (
        f"cost of 1,000 steps, estimated: {range_text(cost, '', result.predicted.interval)}" in text
    )
    assert (
        "cost of 1,000 steps, estimated" in text and "GPU-hours of 1,000 steps, estimated" in text
    )
    assert "WARNING: the pools of pinned host memory and a checkpoint may need" in text
    assert "cost of" not in result._repr_html_() and "WARNING" not in result._repr_html_()


def test_html_page_of_step_that_does_not_fit_lists_changes(result):
    memory = dataclasses.replace(result.memory, device_temp_bytes=90 * GIB)
    change = Change(overrides="--config.memory.remat=full", cost="t<1", device_peak_bytes=GIB, host_bytes_per_node=0,
                    fits=True)  # fmt: skip
    text = dataclasses.replace(result, memory=memory, advice=(change,))._repr_html_()
    assert (
        ">does not fit</span>" in text and "--config.memory.remat=full" in text and "t&lt;1" in text
    )


def test_html_page_without_matplotlib_is_text(result, monkeypatch):
    monkeypatch.setattr("jaxlc.core.errors.is_installed", lambda package: False)
    text = result._repr_html_()
    assert (
        "<svg" not in text
        and "VERDICT: fits" in text
        and "pip install -e &#x27;.[plot]&#x27;" in text
    )
    with pytest.raises(UserError, match="needs the package matplotlib"):
        result.memory_figure()


def test_page_fits_a_terminal(result):
    text = page(result, "")
    assert max(map(len, text.splitlines())) <= 120
    assert "VERDICT: fits" in str(result) and "cudnn attention forward" in text


def test_page_labels_largest_arrays_by_scope(result):
    lines = page(result, "").split("largest arrays")[1].splitlines()[1:6]
    assert any("mlp, backward: " in line for line in lines), lines
    assert not any("jvp" in line or "while" in line or "shard_map" in line for line in lines), lines


def test_page_uses_exposed_for_waiting_kernels_only(result):
    """The ring section counts permutes that attention does not hide; exposed is estimated waiting
    time.
    """
    text = page(
        dataclasses.replace(
            result, ring=dataclasses.replace(result.ring, exposed=3, exposed_forward=1)
        ),
        "",
    )
    (line,) = (line for line in text.splitlines() if "not hidden by attention" in line)
    assert line.split()[-6:] == ["3", "1", "in", "the", "forward", "pass"]
    exposed = [line for line in text.splitlines() if "exposed" in line]
    assert exposed and all(
        line.strip().startswith(("communication", "host copies")) for line in exposed
    )


def test_hints_name_document_mask_only_if_it_excludes_cudnn(result):
    assert result.hints == ()
    config = small_config()
    config.attention.document_mask = True
    masked = load(config)
    # cuDNN has packed documents
    assert hints(build_step(masked, make_mesh(topology("h100:1x4"), masked.mesh))) == ()
    step = build_step(masked, make_mesh(topology("a100:1x4"), masked.mesh))
    (hint,) = hints(step)
    assert hint.startswith(
        "--config.attention.document_mask=False allows the cuDNN attention kernel"
    )
    assert "hint: --config.attention.document_mask=False" in page(
        dataclasses.replace(result, hints=(hint,)), ""
    )
    blockwise = dataclasses.replace(
        masked, attention=dataclasses.replace(masked.attention, kernel="blockwise")
    )
    assert hints(build_step(blockwise, step.mesh)) == ()


@pytest.mark.parametrize("mesh, words", [
    (dict(context=4, tensor=2), "h100:2x2 has 4; use --config.mesh.tensor=1, or another --topology, of 8 GPUs"),
    (dict(context=3, tensor=1), "h100:2x2 has 4"),
])  # fmt: skip
def test_plan_with_mesh_of_another_size_names_one_that_fits(mesh, words):
    config = small_config()
    config.data.seq_len = 3 * 4096
    config.mesh.update(mesh)
    with pytest.raises(UserError, match=words):
        plan.plan(config, "h100:2x2")


@pytest.mark.parametrize("settings, words", [
    (dict(runtime=dict(transport="peer")), "peer copies need all GPUs in one process"),
    (
        dict(attention=dict(kernel="cudnn", document_mask=True, strategy="all_gather")),
        "unsupported by attention kernel cudnn",
    ),
    (dict(data=dict(seq_len=2**40)), "compilation failed with config.data.seq_len=1099511627776"),
], ids=["transport", "kernel", "size"])  # fmt: skip
def test_plan_of_unsupported_settings_raises_one_line(settings, words):
    config = small_config()
    config.update(settings)
    with pytest.raises(UserError, match=words) as raised:
        plan.plan(load(config), "h100:2x2")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("status, advice", [
    ("INTERNAL: No supported config found for HLO: %gemm_fusion_dot", "a defect of the compiler of JAX"),
    ("RESOURCE_EXHAUSTED: too many elements", "use a shorter sequence or a larger config.mesh.context"),
    ("UNAVAILABLE: No PTX compilation provider is available", "pip install nvidia-cuda-nvcc-cu12"),
    ("RESOURCE_EXHAUSTED: /x/tempfile-vm-1; No space left on device", "set TMPDIR to a directory that is writable"),
], ids=["internal", "size", "assembler", "temporary files"])  # fmt: skip
def test_plan_with_failing_compiler_advises_by_status(status, advice, monkeypatch):
    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(f"{status}\nmore lines")

    monkeypatch.setattr(TrainStep, "compile", fail)
    with pytest.raises(UserError, match=f"{status}; .*{advice}"):
        plan.plan(small_config(), "h100:2x2")
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # as if Python had found none
    with pytest.raises(UserError, match=r"temporary files \(No such file.*\): set TMPDIR"):
        plan.plan(small_config(), "h100:2x2")


def test_place_in_memory_moves_arguments_to_host_memory():
    """Without it, JAX drops the memory kinds of absent devices. One argument is unused."""
    mesh = make_mesh(topology("h100:1x2"), MeshConfig(context=2))
    array = jax.ShapeDtypeStruct(
        (2**20,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("context"))
    )

    kinds, result_kinds = (None, None, "pinned_host"), (None, "pinned_host")
    shardings = tuple(
        NamedSharding(mesh, PartitionSpec("context"), memory_kind=kind) for kind in result_kinds
    )

    def host_and_device_bytes(**memory_kinds):
        def add(_, on_device, on_host):
            moved = jax.device_put(on_host, jax.memory.Space.Device)
            return on_device + moved, jax.device_put(2 * moved, jax.memory.Space.Host)

        jitted = jax.jit(add, donate_argnums=2, out_shardings=shardings)
        lowered = jitted.lower(array, array, array)
        if memory_kinds:
            place_in_memory(lowered, **memory_kinds)
        memory = lowered.compile(compiler_options=dict(WITHOUT_GPU)).memory_analysis()
        return (
            memory.host_argument_size_in_bytes,
            memory.argument_size_in_bytes,
            memory.alias_size_in_bytes,
        )

    one = 2**20 * 4 // 2  # per device
    assert host_and_device_bytes() == (0, 2 * one, one)
    assert host_and_device_bytes(arguments=kinds, results=result_kinds) == (one, one, 0)
