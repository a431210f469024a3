"""The cuDNN kernel without a GPU; test_cudnn_packed.py tests packed documents.

Tested: the operands and settings of cuDNN's calls. A fake replaces the private functions of JAX
that call cuDNN and computes attention with the reference, so the results match only if the operands
are correct. Also tested: the programs that XLA compiles ahead of time for an H100.

Not tested: the results that cuDNN itself computes on a GPU. scripts/gpu_first_contact.py compares
those with the reference.
"""

import functools
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as fmha
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.attention import attend, choose, make
from jaxlc.attention.contract import AttentionSpec, QueryResults
from jaxlc.attention.kernels import cudnn, reference
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.config import AttentionConfig, MeshConfig
from jaxlc.core.axes import CONTEXT
from jaxlc.core.errors import UserError
from jaxlc.hlo import parse
from jaxlc.simulate.topology import WITHOUT_GPU, make_mesh, topology
from tests.attention.cases import assert_rows_match, inputs, oracle, sharded, split_mesh
from tests.tolerances import BFLOAT16_ATTENTION, FLOAT32_PARITY

pytestmark = pytest.mark.jax_version

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


def _top_left(query, key, scale, mask_type, sliding_window_length):
    """(ranges, spec) of the reference for these cuDNN settings: masks are aligned at the first
    query and key.
    """
    queries, keys = (
        TokenInfo(jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2]), None)
        for x in (query, key)
    )
    causal = {fmha.MaskType.CAUSAL: True, fmha.MaskType.NO_MASK: False}[mask_type]
    spec = AttentionSpec(causal=causal, window=sliding_window_length, scale=scale)
    return key_ranges(queries, keys, spec), spec


def _forward_jax_0_10(
    query, key, value, bias, q_seqlen, kv_seqlen, q_offsets, kv_offsets, page_table_k, page_table_v,
    scale, seed, dropout_rate, variadic_args, mask_type, layout, sliding_window_length, is_training,
):  # fmt: skip
    assert (
        is_training
        and not any(variadic_args)
        and dropout_rate == 0
        and layout == fmha.AttentionLayout.BTNH.value
    )
    assert all(
        x.size == 0
        for x in (bias, q_seqlen, kv_seqlen, q_offsets, kv_offsets, page_table_k, page_table_v)
    )
    out, lse = reference.forward(
        query, key, value, *_top_left(query, key, scale, mask_type, sliding_window_length)
    )
    return out.astype(query.dtype), lse


def _backward_jax_0_10(
    query, key, value, bias, q_seqlen, kv_seqlen, q_offsets, kv_offsets, page_table_k, page_table_v,
    activation, fwd_output, grad_output,
    scale, seed, dropout_rate, variadic_args, mask_type, layout, sliding_window_length,
):  # fmt: skip
    assert fwd_output.dtype == grad_output.dtype == query.dtype and activation.dtype == jnp.float32
    ranges, spec = _top_left(query, key, scale, mask_type, sliding_window_length)
    results = fwd_output, activation, grad_output, jnp.zeros_like(activation)
    return [
        x.astype(query.dtype)
        for x in reference.backward(query, key, value, ranges, spec, QueryResults(*results))
    ]


def _forward_jax_0_12(*operands, score_mod_args, score_mod, **settings):
    assert score_mod_args == () and score_mod is None
    return _forward_jax_0_10(*operands, **settings)


def _backward_jax_0_12(*operands, score_mod_args, score_mod, **settings):
    assert score_mod_args == () and score_mod is None
    return _backward_jax_0_10(*operands, **settings)


@pytest.fixture
def fake_cudnn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """The reference without a gradient of the lse, with the private signatures of a JAX version
    (param).
    """
    forward, backward = {
        "jax 0.10": (_forward_jax_0_10, _backward_jax_0_10),
        "jax 0.12": (_forward_jax_0_12, _backward_jax_0_12),
    }[request.param]
    monkeypatch.setattr(fmha, "_dot_product_attention_fwd_impl", forward)
    monkeypatch.setattr(fmha, "_dot_product_attention_bwd_impl", backward)
    monkeypatch.setattr(cudnn, "unsupported", lambda problem: None)
    jax.clear_caches()  # programs with the fake of the other version
    yield
    jax.clear_caches()


SPECS = dict(
    causal=AttentionSpec(),
    full=AttentionSpec(causal=False, scale=0.3),
    window=AttentionSpec(window=7),
)


@pytest.mark.parametrize("fake_cudnn", ["jax 0.10", "jax 0.12"], indirect=True)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_cudnn_operands_give_reference_results(fake_cudnn, spec):
    """Grouped queries, a scale, narrower values, and a gradient of the lse, which cuDNN does not
    have.
    """
    q, k, v, dout = inputs(batch=2, value_dim=8)
    dlse = jax.random.normal(jax.random.key(9), (2, q.shape[2], q.shape[1]))
    out, lse = reference.forward(q, k, v, None, spec)
    gradients = reference.backward(q, k, v, None, spec, QueryResults(out, lse, dout, dlse))
    actual = cudnn.forward(q, k, v, None, spec)
    actual_gradients = cudnn.backward(q, k, v, None, spec, QueryResults(out, lse, dout, dlse))
    assert all(x.dtype == jnp.float32 for x in (*actual, *actual_gradients))
    assert_rows_match(actual, (out, lse), FLOAT32_PARITY)
    assert_rows_match(actual_gradients, gradients, FLOAT32_PARITY)


@pytest.mark.parametrize("fake_cudnn", ["jax 0.10"], indirect=True)
def test_cudnn_under_vmap_matches_reference(fake_cudnn):
    """Three sets of queries over the same keys."""
    q, k, v, dout = inputs(batch=2)
    queries, spec = jnp.stack([q, 2 * q, -q]), AttentionSpec()
    dlse = jnp.zeros((2, q.shape[2], q.shape[1]))

    def results_of(kernel):
        def attend_set(q):
            out, lse = kernel.forward(q, k, v, None, spec)
            return (
                out,
                lse,
                *kernel.backward(q, k, v, None, spec, QueryResults(out, lse, dout, dlse)),
            )

        return jax.vmap(attend_set)(queries)

    assert_rows_match(results_of(cudnn), results_of(reference), FLOAT32_PARITY)


@pytest.mark.gpu_compiler
def test_attend_with_cudnn_under_vmap_lowers():
    """cuDNN's primitives have no rule for vmap; ours makes the new dimension a part of the batch."""
    mesh = make_mesh(topology("h100:1x8"), MeshConfig(context=8))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, CONTEXT))
    q = jax.ShapeDtypeStruct((3, 2, 256, 4, 64), jnp.bfloat16, sharding=sharding)

    def loss(q):
        return (
            jax.vmap(lambda q: attend(q, q, q, mesh=mesh, kernel="cudnn"))(q)
            .astype(jnp.float32)
            .sum()
        )

    text = jax.jit(jax.grad(loss)).lower(q).as_text()
    assert FORWARD in text and BACKWARD in text


@pytest.mark.parametrize("fake_cudnn", ["jax 0.10"], indirect=True)
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_strategy_with_cudnn_matches_reference(fake_cudnn, strategy):
    """Every partial result is rounded to bfloat16 once, as in cuDNN."""
    heads = dict(num_heads=4, num_kv_heads=2)
    settings = dict(strategy=strategy, kernel="cudnn", heads=heads)
    actual = sharded(split_mesh(context=4), packed=False, dtype=jnp.bfloat16, **settings)
    assert_rows_match(actual, oracle(packed=False, dtype=jnp.bfloat16, **heads), BFLOAT16_ATTENTION)


def test_cudnn_with_causal_and_unequal_lengths_raises():
    q, k, v, _ = inputs(batch=2)
    with pytest.raises(NotImplementedError, match="causal attention of 30 queries over 96 keys"):
        cudnn.forward(q[:, :30], k, v, None, AttentionSpec())


def test_workspace_bytes_at_1m_keys():
    """Llama 3 8B at 2^20 keys: 16 GiB of float32 dq, 4 bytes per query and head, and dk and dv of
    32 heads.
    """
    q_shape, k_shape = (1, 2**20, 32, 128), (1, 2**20, 8, 128)
    assert cudnn.workspace_bytes(q_shape, k_shape, backward=True) == 16 * 2**30 + 2**27 + 16 * 2**30
    assert cudnn.workspace_bytes(q_shape, q_shape, backward=True) == 16 * 2**30 + 2**27
    assert cudnn.workspace_bytes(q_shape, k_shape, backward=False) == 0


def _compiled(function, *abstract):
    return parse(
        jax.jit(function).lower(*abstract).compile(compiler_options=dict(WITHOUT_GPU)).as_text()
    )


def _instructions(program, opcode):
    return [
        instruction
        for computation in program
        for instruction in computation
        if instruction.opcode == opcode
    ]


def _calls(program, target):
    """The number of cuDNN calls in the program for each (mask, dtypes of the operands, dtypes of
    the results).
    """
    counts = Counter()
    for computation in program:
        for call in computation:
            if call.attributes.get("custom_call_target") == f'"{target}"':
                operands = [
                    array.dtype
                    for operand in computation.operands(call)
                    for array in operand.arrays
                ]
                results = [array.dtype for array in call.arrays]
                mask = call.backend_config["cudnn_fmha_backend_config"]["mask_type"]
                counts[mask, " ".join(operands), " ".join(results)] += 1
    return counts


@pytest.mark.gpu_compiler
def test_h100_call_is_one_kernel_plus_conversions():
    mesh = make_mesh(topology("h100:1x1"), MeshConfig())
    sharding = NamedSharding(mesh, PartitionSpec())
    q, k, v, out = (
        jax.ShapeDtypeStruct((2, 256, heads, width), jnp.bfloat16, sharding=sharding)
        for heads, width in ((4, 64), (2, 64), (2, 32), (4, 32))
    )
    lse = jax.ShapeDtypeStruct((2, 4, 256), jnp.float32, sharding=sharding)
    spec = AttentionSpec(window=32)

    def backward(q, k, v, out, lse, dout):
        return cudnn.backward(
            q, k, v, None, spec, QueryResults(out, lse, dout, jnp.zeros_like(lse))
        )

    programs = (
        _compiled(lambda q, k, v: cudnn.forward(q, k, v, None, spec), q, k, v),
        _compiled(backward, q, k, v, out, lse, out),
    )
    for program, num_results in zip(programs, (1, 3), strict=True):
        opcodes = Counter(instruction.opcode for instruction in program.entry)
        assert opcodes["custom-call"] == 1 and opcodes["fusion"] <= num_results, opcodes
        assert not opcodes.keys() & {"copy", "transpose", "conditional"}, opcodes
        (call,) = _instructions(program, "custom-call")
        assert call.backend_config["cudnn_fmha_backend_config"]["sliding_window_length"] == 32


@pytest.fixture(scope="module")
def ring_on_h100s():
    """`compiled(uses_lse)`: forward and backward of two rematerialized layers, ring over 8 H100s."""
    mesh = make_mesh(topology("h100:1x8"), MeshConfig(context=8))
    config = AttentionConfig(strategy="ring", kernel="auto")
    attend = make(config, mesh)
    assert choose(config, mesh, head_dim=64, dtype=jnp.bfloat16, packed=False).name == "cudnn"
    sharding = NamedSharding(mesh, PartitionSpec(None, CONTEXT))
    q, k = (
        jax.ShapeDtypeStruct((1, 4096, heads, 64), jnp.bfloat16, sharding=sharding)
        for heads in (4, 2)
    )

    @functools.cache
    def compiled(uses_lse: bool):
        def layer(x, k, v):
            out, lse = attend(x, k, v)
            return out + lse.swapaxes(1, 2)[..., None].astype(out.dtype) if uses_lse else out

        def loss(q, k, v):
            layers = jax.checkpoint(lambda x, _: (layer(x, k, v), None))
            return lax.scan(layers, q, length=2)[0].astype(jnp.float32).sum()

        return _compiled(jax.grad(loss, (0, 1, 2)), q, k, k)

    return compiled


@pytest.mark.gpu_compiler
def test_hybrid_with_cudnn_lowers_with_second_mesh():
    """JAX allows cuDNN's primitives in programs with two meshes only after the edit in
    `_jax_internals`.
    """
    mesh = make_mesh(topology("h100:1x8"), MeshConfig(context=8))
    attend = make(AttentionConfig(strategy="hybrid", kernel="cudnn", ulysses_degree=2), mesh)
    q = jax.ShapeDtypeStruct(
        (1, 256, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(None, CONTEXT))
    )
    lowered = jax.jit(lambda q: attend(q, q, q)).lower(q)
    assert FORWARD in lowered.as_text()


@pytest.mark.gpu_compiler
def test_ring_on_h100s_has_expected_cudnn_calls(ring_on_h100s):
    """Ring step 0 is causal; the others are not. Operands are bfloat16, the lse is float32."""
    program = ring_on_h100s(uses_lse=False)
    qkv = "bf16 bf16 bf16"
    # The program has every forward call twice: in the forward pass, and recomputed for the backward
    # pass.
    assert _calls(program, FORWARD) == {
        ("CAUSAL", qkv, "bf16 f32 u8"): 2,
        ("NO_MASK", qkv, "bf16 f32 u8"): 6,
    }
    assert _calls(program, BACKWARD) == {
        ("CAUSAL", f"{qkv} f32 bf16 bf16", "bf16 bf16 bf16 u8"): 1,
        ("NO_MASK", f"{qkv} f32 bf16 bf16", "bf16 bf16 bf16 u8"): 3,
    }


@pytest.mark.gpu_compiler
def test_unused_lse_gradient_is_removed_by_xla(ring_on_h100s):
    """XLA removes the branch if the gradient is zero. If the lse is used, each of the four calls
    has a branch.
    """
    assert _instructions(ring_on_h100s(uses_lse=False), "conditional") == []
    program = ring_on_h100s(uses_lse=True)
    assert len(_instructions(program, "conditional")) == 4
    assert _calls(program, BACKWARD).total() == 8


@pytest.mark.parametrize(
    ("capability", "version", "is_supported"),
    [
        ("9.0", (9, 8, 0), True),
        ("10.0", (9, 17, 1), False),
        ("10.0", (9, 18, 0), True),
        ("12.0", (9, 10, 2), False),
    ],
)
def test_deterministic_backward_on_blackwell_needs_new_cudnn(
    capability, version, is_supported, monkeypatch
):
    monkeypatch.setattr(cudnn, "cudnn_version", lambda: version)
    with (
        nullcontext()
        if is_supported
        else pytest.raises(UserError, match=r"cuDNN 9\.1.* 9\.18\.0 and later.*pallas")
    ):
        cudnn.check_deterministic(SimpleNamespace(compute_capability=capability))
