"""The kernel `pallas` beyond the shared suite: what it skips, awkward sizes, big arrays, and the program for a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

from jaxlc.attention import pallas, reference
from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Masks
from jaxlc.simulate.topology import WITHOUT_GPU, topology
from tests.attention.cases import assert_rows_match, inputs, row_offsets
from tests.tolerances import BFLOAT16_ATTENTION, FLOAT32_PARITY

BY_INDEX = Masks(None, None, None, None)
SPEC = AttentionSpec(query_block_tokens=16, key_block_tokens=16)


def _check(q, k, v, dout, masks, spec, tolerance=FLOAT32_PARITY):
    float32 = [x.astype(jnp.float32) for x in (q, k, v)]
    out, lse = reference.forward(*float32, masks, spec)
    got_out, got_lse = pallas.forward(q, k, v, masks, spec)
    assert_rows_match(got_out, out, tolerance)
    np.testing.assert_array_equal(np.isneginf(got_lse), np.isneginf(lse))
    assert_rows_match(jnp.maximum(got_lse, -1e3), jnp.maximum(lse, -1e3), tolerance)
    dlse = jnp.ones_like(lse)
    got = pallas.backward(q, k, v, masks, spec, out, lse, dout, dlse)
    assert_rows_match(got, reference.backward(*float32, masks, spec, out, lse, dout, dlse), tolerance)


def _lengths(num_queries: int, num_keys: int, **other):
    q, _, _, dout = inputs(batch=1, num_tokens=num_queries, **other)
    _, k, v, _ = inputs(batch=1, num_tokens=num_keys, seed=1, **other)
    return q, k, v, dout


@pytest.mark.parametrize("window", [None, 5, 21])
@pytest.mark.parametrize("lengths", [(40, 40), (23, 50), (50, 23)], ids=["equal", "fewer_queries", "more_queries"])
def test_masks_by_index_and_lengths_that_are_no_multiple_of_the_tile(lengths, window):
    """More queries than keys: the first ones come before all keys and see none."""
    spec = AttentionSpec(window=window, query_block_tokens=16, key_block_tokens=16)
    _check(*_lengths(*lengths), BY_INDEX, spec)


def test_full_attention_over_an_incomplete_tile():
    _check(*_lengths(23, 50), BY_INDEX, AttentionSpec(causal=False, key_block_tokens=16))


def test_head_dims_that_are_no_power_of_2_and_float16():
    _check(*_lengths(23, 23, head_dim=12, value_dim=20, dtype=jnp.float16), BY_INDEX, SPEC, BFLOAT16_ATTENTION)


def test_documents_in_more_pieces_than_a_list_of_runs_holds():
    segments = (jnp.arange(320, dtype=jnp.int32)[None] // 16) % 2 + 1
    _check(*_lengths(320, 320), Masks(None, None, segments, segments), SPEC)


def test_reruns_give_the_same_bits():
    q, k, v, dout = _lengths(40, 40, dtype=jnp.bfloat16)
    out, lse = pallas.forward(q, k, v, BY_INDEX, SPEC)
    first, again = (pallas.backward(q, k, v, BY_INDEX, SPEC, out, lse, dout, lse) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_tiles_that_nobody_sees_are_skipped():
    """Of two documents in tiles of their own, one is all NaN: where its tiles were visited, 0 x NaN would tell."""
    segments = jnp.repeat(jnp.array([[1, 2]], jnp.int32), 32, axis=1)
    masks = Masks.of_row(row_offsets(1)[:, :64], segments)
    for broken, healthy in ((slice(32, 64), slice(0, 32)), (slice(0, 32), slice(32, 64))):
        q, k, v, dout = (x.at[:, broken].set(jnp.nan) for x in inputs(batch=1, num_tokens=64))
        out, lse = pallas.forward(q, k, v, masks, SPEC)
        gradients = pallas.backward(q, k, v, masks, SPEC, out, lse, dout, 0 * lse)
        for x in (out, lse.swapaxes(1, 2), *gradients):
            assert np.isfinite(x[:, healthy]).all() and np.isnan(x[:, broken]).any()


def test_the_future_is_skipped_by_index():
    q, k, v, dout = inputs(batch=1, num_tokens=64)
    k, v = (x.at[:, 32:].set(jnp.nan) for x in (k, v))
    out, lse = pallas.forward(q, k, v, BY_INDEX, SPEC)
    dq, _, _ = pallas.backward(q, k, v, BY_INDEX, SPEC, out, lse, dout, 0 * lse)
    assert np.isfinite(out[:, :32]).all() and np.isfinite(dq[:, :32]).all() and np.isnan(out[:, 32:]).all()


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        (dict(head_dim=256), "head dim 256, and it does up to 128"),
        (dict(value_dim=192), "head dim of values 192, and it does up to 128"),
        (dict(dtype="float64"), "dtype float64, and it does bfloat16, float16, float32"),
        (dict(compute_capability="7.5"), "it needs compute capability 8.0, and this GPU has 7.5"),
        (dict(platform="tpu"), "platform tpu, and it does gpu (and cpu, for tests)"),
        (dict(), None),
    ],
)
def test_what_it_declines(change, limit):
    case = dict(platform="gpu", compute_capability="9.0", dtype="bfloat16", head_dim=128, value_dim=128)
    assert pallas.unsupported(AttentionProblem(**case | dict(window=7, implicit_positions=False) | change)) == limit


def _abstract_operands(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int):
    """Arguments of `_both`, in bfloat16."""
    q, k = ((1, num_tokens, heads, head_dim) for heads in (num_heads, num_kv_heads))
    tokens = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)
    q_BTNH, k_BSKH = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, k))
    lse_BNT = jax.ShapeDtypeStruct((1, num_heads, num_tokens), jnp.float32)
    return q_BTNH, k_BSKH, Masks.of_row(tokens, tokens), jax.ShapeDtypeStruct(q, jnp.float32), lse_BNT


def _both(q, k, masks, out, lse):
    """Forward and backward as they would be in a training step."""
    gradients = pallas.backward(q, k, k, masks, AttentionSpec(), out, lse, q, lse)
    return pallas.forward(q, k, k, masks, AttentionSpec()), gradients


def _as_on_an_h100():
    """A context in which Triton kernels lower without a GPU: JAX 0.11 and later ask which one is meant."""
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def _triton_programs(lowered) -> dict[str, str]:
    """Text of each Triton kernel in a lowered program, by its name."""
    configs, programs = [], {}

    def visit(operation):
        if operation.operation.name == "stablehlo.custom_call":
            configs.append(operation.operation.attributes["mhlo.backend_config"])
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    for config in configs:
        with ir.Context() as context:
            triton_dialect.register_dialect(context)
            program = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
            programs[ir.StringAttr(config["name"]).value] = str(program)
    return programs


@pytest.mark.parametrize(("num_tokens", "bits"), [(2**20, 64), (2**14, 32)])
def test_offsets_into_big_arrays_have_64_bits(num_tokens, bits):
    """[1, 1048576, 32, 128] has 2^32 elements. What is multiplied by a stride is widened before, not after."""
    with _as_on_an_h100():
        traced = jax.jit(_both).trace(*_abstract_operands(num_tokens, 32, 32, 128))
        programs = _triton_programs(traced.lower(lowering_platforms=("cuda",)))
    assert len(programs) == 3
    for name, text in programs.items():
        offsets = re.findall(r"tt.addptr .* : tensor<\d+x\d+x!tt.ptr<b?f\d+>>, tensor<\d+x\d+xi(\d+)>", text)
        assert offsets and set(offsets) == {str(bits)}, name
        products = re.findall(r"arith.muli .* : tensor<\d+x\d+xi(\d+)>", text)
        assert products and set(products) == {str(bits)}, name


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("gpu", "head_dim"),
    [("h100", 128), *(pytest.param(*x, marks=pytest.mark.heavy) for x in (("h100", 96), ("a100", 128), ("b200", 64)))],
)
def test_compiles_for_gpus_that_are_not_here(gpu, head_dim):
    """Inside a shard_map, as attention always is: it tells Triton which GPU is meant."""
    mesh = jax.sharding.Mesh(topology(f"{gpu}:1x1").devices, ("x",))
    replicated = jax.sharding.NamedSharding(mesh, PartitionSpec())
    operands = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), _abstract_operands(2048, 8, 2, head_dim)
    )
    on_device = jax.shard_map(_both, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    program = jax.jit(on_device).lower(*operands).compile(compiler_options=dict(WITHOUT_GPU))
    for kernel in ("flash_forward", "flash_dq", "flash_dkv"):
        assert kernel in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 2**20  # nothing of size tokens x tokens, no repeated heads
