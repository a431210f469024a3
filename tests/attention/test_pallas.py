"""The kernel `pallas`: skipped blocks, sizes that are no multiples of blocks, large arrays, and
programs for GPUs.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

from jaxlc.attention.contract import AttentionProblem, AttentionSpec, KeyRanges, QueryResults
from jaxlc.attention.kernels import packed_check, pallas, reference
from jaxlc.attention.kernels.choose import KernelSelection
from jaxlc.attention.key_ranges import TokenInfo, has_small_shared_memory, key_ranges
from jaxlc.simulate.topology import WITHOUT_GPU, topology
from jaxlc.step import step as train_step
from tests.attention.cases import assert_rows_match, inputs, sequence_positions
from tests.step.synthetic import small_config
from tests.tolerances import BFLOAT16_ATTENTION, FLOAT32_PARITY

DEFAULTS = AttentionSpec()
SPEC = AttentionSpec(query_block_tokens=16, key_block_tokens=16)


def _check(q, k, v, dout, ranges, spec, tolerance=FLOAT32_PARITY):
    float32 = [x.astype(jnp.float32) for x in (q, k, v)]
    out, lse = reference.forward(*float32, ranges, spec)
    actual_out, actual_lse = pallas.forward(q, k, v, ranges, spec)
    assert_rows_match(actual_out, out, tolerance)
    np.testing.assert_array_equal(np.isneginf(actual_lse), np.isneginf(lse))
    assert_rows_match(jnp.maximum(actual_lse, -1e3), jnp.maximum(lse, -1e3), tolerance)
    dlse = jnp.ones_like(lse)
    actual = pallas.backward(q, k, v, ranges, spec, QueryResults(out, lse, dout, dlse))
    assert_rows_match(
        actual,
        reference.backward(*float32, ranges, spec, QueryResults(out, lse, dout, dlse)),
        tolerance,
    )


def _lengths(num_queries: int, num_keys: int, **other):
    q, _, _, dout = inputs(batch=1, num_tokens=num_queries, **other)
    _, k, v, _ = inputs(batch=1, num_tokens=num_keys, seed=1, **other)
    return q, k, v, dout


@pytest.mark.parametrize("window", [None, 5, 21])
@pytest.mark.parametrize(
    "lengths", [(40, 40), (23, 50), (50, 23)], ids=["equal", "fewer_queries", "more_queries"]
)
def test_implicit_positions_with_partial_blocks_match_reference(lengths, window):
    """With more queries than keys, the first queries precede all keys and are fully masked."""
    spec = AttentionSpec(window=window, query_block_tokens=16, key_block_tokens=16)
    _check(*_lengths(*lengths), None, spec)


def test_full_attention_with_partial_blocks_matches_reference():
    _check(*_lengths(23, 50), None, AttentionSpec(causal=False, key_block_tokens=16))


def test_head_dims_not_power_of_2_in_float16_match_reference():
    _check(
        *_lengths(23, 23, head_dim=12, value_dim=20, dtype=jnp.float16),
        None,
        SPEC,
        BFLOAT16_ATTENTION,
    )


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype", "tolerance", "query_block"),
    [
        (192, 128, jnp.float32, FLOAT32_PARITY, 16),
        pytest.param(256, 256, jnp.bfloat16, BFLOAT16_ATTENTION, 64, marks=pytest.mark.jax_version),
    ],
)
def test_head_dims_above_128_match_reference_in_smaller_blocks(
    head_dim, value_dim, dtype, tolerance, query_block
):
    q, k, v, dout = _lengths(90, 90, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    spec = AttentionSpec(window=40)
    assert pallas._params("flash_forward", q, k, v, spec).mask.query_block == query_block
    _check(q, k, v, dout, None, spec, tolerance)


@pytest.mark.jax_version
def test_more_ranges_than_the_list_holds_match_reference():
    """In blocks of 16, queries attend alternately to the first and to the last keys."""
    start_BT = (jnp.arange(320, dtype=jnp.int32)[None] // 16) % 2 * 160
    _check(*_lengths(320, 320), KeyRanges(start_BT, start_BT + 160), SPEC)


@pytest.mark.jax_version
def test_backward_is_bitwise_reproducible():
    q, k, v, dout = _lengths(40, 40, dtype=jnp.bfloat16)
    out, lse = pallas.forward(q, k, v, None, SPEC)
    first, again = (
        pallas.backward(q, k, v, None, SPEC, QueryResults(out, lse, dout, lse)) for _ in range(2)
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.jax_version
def test_fully_masked_blocks_are_skipped():
    """One of two documents, in blocks of its own, is all NaN: computing its blocks would give 0 x
    NaN = NaN.
    """
    segments = jnp.repeat(jnp.array([[1, 2]], jnp.int32), 32, axis=1)
    tokens = TokenInfo(sequence_positions(1)[:, :64], segments)
    ranges = key_ranges(tokens, tokens, SPEC)
    for broken, healthy in ((slice(32, 64), slice(0, 32)), (slice(0, 32), slice(32, 64))):
        q, k, v, dout = (x.at[:, broken].set(jnp.nan) for x in inputs(batch=1, num_tokens=64))
        out, lse = pallas.forward(q, k, v, ranges, SPEC)
        gradients = pallas.backward(q, k, v, ranges, SPEC, QueryResults(out, lse, dout, 0 * lse))
        for x in (out, lse.swapaxes(1, 2), *gradients):
            assert np.isfinite(x[:, healthy]).all() and np.isnan(x[:, broken]).any()


def test_blocks_after_the_diagonal_are_skipped():
    q, k, v, dout = inputs(batch=1, num_tokens=64)
    k, v = (x.at[:, 32:].set(jnp.nan) for x in (k, v))
    out, lse = pallas.forward(q, k, v, None, SPEC)
    dq, _, _ = pallas.backward(q, k, v, None, SPEC, QueryResults(out, lse, dout, 0 * lse))
    assert (
        np.isfinite(out[:, :32]).all()
        and np.isfinite(dq[:, :32]).all()
        and np.isnan(out[:, 32:]).all()
    )


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        (dict(head_dim=264), "head dim 264 (supported: up to 256)"),
        (dict(value_dim=264), "head dim 264 of values (supported: up to 256)"),
        (dict(dtype="float64"), "dtype float64 (supported: bfloat16, float16, float32)"),
        (dict(compute_capability="7.5"), "compute capability 7.5 (supported: 8.0 and later)"),
        (dict(platform="tpu"), "platform tpu (supported: gpu; cpu for tests)"),
        (dict(), None),
    ],
)
def test_unsupported_has_value_and_limit(change, limit):
    problem = dict(
        platform="gpu", compute_capability="9.0", dtype="bfloat16", head_dim=128, value_dim=128
    )
    assert (
        pallas.unsupported(
            AttentionProblem(**problem | dict(window=7, implicit_positions=False) | change)
        )
        == limit
    )


def _abstract_operands(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int):
    """Arguments of `_both`, in bfloat16."""
    q, k = ((1, num_tokens, heads, head_dim) for heads in (num_heads, num_kv_heads))
    tokens = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)
    q_BTNH, k_BSKH = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, k))
    lse_BNT = jax.ShapeDtypeStruct((1, num_heads, num_tokens), jnp.float32)
    return q_BTNH, k_BSKH, KeyRanges(tokens, tokens), jax.ShapeDtypeStruct(q, jnp.float32), lse_BNT


def _both(q, k, ranges, out, lse, spec=DEFAULTS):
    """Forward and backward as in a training step."""
    gradients = pallas.backward(q, k, k, ranges, spec, QueryResults(out, lse, q, lse))
    return pallas.forward(q, k, k, ranges, spec), gradients


def _targeting_h100():
    """A context in which Triton kernels lower without a GPU: JAX 0.11 and later need the target
    device.
    """
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def _triton_programs(lowered) -> dict[str, str]:
    """The text of each Triton kernel in a lowered program, by kernel name."""
    configs, programs = [], {}

    def collect(operation):
        if operation.operation.name == "stablehlo.custom_call":
            configs.append(operation.operation.attributes["mhlo.backend_config"])
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(collect)
    for config in configs:
        with ir.Context() as context:
            triton_dialect.register_dialect(context)
            program = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
            programs[ir.StringAttr(config["name"]).value] = str(program)
    return programs


@pytest.mark.jax_version
def test_triton_is_not_imported_with_other_kernels():
    """JAX 0.11 deprecates Pallas' Triton backend; importing the trainer and training with another
    kernel must not.
    """
    code = (
        "import sys, jax, jax.numpy as jnp, jaxlc.step.step;"
        " from jaxlc.attention.contract import AttentionSpec; from jaxlc.attention.kernels.choose import KERNELS;"
        " x = jnp.ones((1, 8, 1, 8)); KERNELS['blockwise'].forward(x, x, x, None, AttentionSpec());"
        " assert 'jax.experimental.pallas.triton' not in sys.modules;"
        " jax.eval_shape(lambda x: KERNELS['pallas'].forward(x, x, x, None, AttentionSpec()), x);"
        " assert 'jax.experimental.pallas.triton' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


@pytest.mark.jax_version
@pytest.mark.parametrize(("num_tokens", "bits"), [(2**20, 64), (2**14, 32)])
def test_offsets_into_large_arrays_have_64_bits(num_tokens, bits):
    """[1, 1048576, 32, 128] has 2^32 elements. Indices are widened before they are multiplied by a
    stride.
    """
    with _targeting_h100():
        traced = jax.jit(_both).trace(*_abstract_operands(num_tokens, 32, 32, 128))
        programs = _triton_programs(traced.lower(lowering_platforms=("cuda",)))
    assert len(programs) == 3
    for name, text in programs.items():
        offsets = re.findall(
            r"tt.addptr .* : tensor<\d+x\d+x!tt.ptr<b?f\d+>>, tensor<\d+x\d+xi(\d+)>", text
        )
        assert offsets and set(offsets) == {str(bits)}, name
        products = re.findall(r"arith.muli .* : tensor<\d+x\d+xi(\d+)>", text)
        assert products and set(products) == {str(bits)}, name


@pytest.mark.jax_version
@pytest.mark.gpu_compiler
@pytest.mark.usefixtures("ptxas")
@pytest.mark.parametrize(
    ("gpu", "head_dim"),
    [
        ("h100", 128),
        ("rtx4090", 256),
        *(
            pytest.param(*x, marks=pytest.mark.full)
            for x in (("h100", 96), ("a100", 128), ("b200", 64), ("a100", 256), ("b200", 256))
        ),
    ],
)
def test_pallas_compiles_for_absent_gpus(gpu, head_dim):
    """Inside `shard_map`, as in the trainer: it gives Triton the target GPU. The compiler refuses
    kernels whose blocks do not fit its shared memory.
    """
    mesh = jax.sharding.Mesh(topology(f"{gpu}:1x1").devices, ("x",))
    replicated = jax.sharding.NamedSharding(mesh, PartitionSpec())
    operands = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
        _abstract_operands(2048, 8, 2, head_dim),
    )
    spec = AttentionSpec(small_shared_memory=has_small_shared_memory(mesh.devices.flat[0]))
    on_device = jax.shard_map(
        functools.partial(_both, spec=spec),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    program = jax.jit(on_device).lower(*operands).compile(compiler_options=dict(WITHOUT_GPU))
    for kernel in ("flash_forward", "flash_dq", "flash_dkv"):
        assert kernel in program.as_text()
    # nothing of size tokens x tokens, no repeated heads
    assert program.memory_analysis().temp_size_in_bytes < 2**20


def test_run_compares_only_head_dims_that_no_gpu_has_run(monkeypatch):
    """Both the selection of the check, and the check itself in the interpreter."""
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(train_step, "check_packed", lambda name, device, **sizes: str(sizes))
    for head_dim, num_checks in ((128, 0), (192, 1)):
        config = small_config(model=dict(head_dim=head_dim))
        kernels = {"full": KernelSelection("pallas", "")}
        step = SimpleNamespace(
            config=config, model=None, kernels=kernels, compute_dtype=jnp.bfloat16
        )
        assert len(train_step.check_kernels(step)) == num_checks
    problems = packed_check._problems
    monkeypatch.setattr(packed_check, "_problems", lambda *args: (problems(*args)[0][:1], ""))
    line = packed_check.check_packed(
        "pallas", jax.devices()[0], num_heads=2, num_kv_heads=1, head_dim=192, dtype=jnp.float32,
        document_tokens=(9, -1, 20, 3, -5, 2), large_elements=1,
    )  # fmt: skip
    assert re.search(r"pallas on packed documents: relative error .*e-0\d on cpu", line)
