"""Modules of a layer: initial values, norm, names for remat policies, embedding lookup."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from jaxlc.config.models.presets import PRESETS
from jaxlc.models.block import Init, RMSNorm, in_use, matrix, residual_depth_scale
from jaxlc.models.decoder import lookup
from jaxlc.models.kinds.dense import gated
from jaxlc.models.matmuls import Matmuls
from jaxlc.sharding.rules import Sharder
from jaxlc.simulate.topology import WITHOUT_GPU, topology
from tests.models.small import run, small_inputs, small_mesh, small_model, small_params


def test_init_keys_equal_those_of_flax():
    """The initial values of earlier versions."""
    key = jax.random.key(3)
    init, rngs = Init(key), nnx.Rngs(key, lora=jax.random.fold_in(key, 2**31 - 1))
    for _ in range(3):
        assert init.param_key() == rngs.params() and init.adapter_key() == rngs.lora()


def test_matrix_declares_dims_and_initial_values():
    param = matrix(Init(jax.random.key(0)), fan_in=64, model=64, heads=32, head_dim=16)
    assert param.dims == ("model", "heads", "head_dim")
    assert param[...].shape == (64, 32, 16) and param[...].dtype == jnp.float32
    assert float(param[...].std()) == pytest.approx(1 / 8, rel=0.02)
    assert (
        float(jnp.abs(param[...]).max()) < 3 / 8
    )  # truncated: an untruncated normal of this size reaches 4 deviations


def test_depth_scale_scales_output_matrices():
    assert residual_depth_scale(PRESETS["llama3.1-8b"]) == pytest.approx(1 / 8)
    param = matrix(Init(jax.random.key(0)), fan_in=64, depth_scale=0.1, ffn=64, model=512)
    assert float(param[...].std()) == pytest.approx(0.1 / 8, rel=0.02)


def test_rms_norm_in_bfloat16_rounds_once():
    """bfloat16 in and out, computed in float32: equal to the float64 result, rounded."""
    x = jax.random.normal(jax.random.key(0), (8, 512)).astype(jnp.bfloat16)
    out, wide = RMSNorm(epsilon=1e-5, norm=512)(x), np.asarray(x, np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5)
    assert out.dtype == jnp.bfloat16
    assert (np.asarray(out) == exact.astype(jnp.bfloat16)).mean() > 0.999


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu", "relu2"])
def test_gated_activation_in_bfloat16_rounds_once(activation):
    keys = jax.random.split(jax.random.key(0), 3)
    gate, up, dhidden = (3 * jax.random.normal(key, (1000,), jnp.bfloat16) for key in keys)
    operands = None if activation == "relu2" else gate, up

    def results(dtype):
        wide, cotangent = jax.tree.map(lambda x: x.astype(dtype), (operands, dhidden))
        hidden, vjp = jax.vjp(functools.partial(gated, activation), *wide)
        return hidden, vjp(cotangent)

    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), results(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, results(jnp.bfloat16), rounded)


@pytest.mark.jax_version
@pytest.mark.gpu_compiler
def test_backward_pass_of_rematerialized_activation_has_one_kernel_on_gpus():
    matmuls = Matmuls(None, "mlp_gate", "mlp_up", "mlp_down")

    def block(x, *weights):
        gate, up = (matmuls(name, "TD,DF->TF", x, w) for name, w in zip(matmuls.names[:2], weights))
        return gated("silu", gate, up) @ weights[2]

    def gradients(dout, *arguments):
        return jax.vjp(jax.checkpoint(block), *arguments)[1](dout)

    gpu = SingleDeviceSharding(topology("h100:1x1").devices[0])
    matrix = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=gpu)
    text = jax.jit(gradients).lower(*5 * [matrix]).compile(dict(WITHOUT_GPU)).as_text()
    kernels = re.findall(r" = (.*) fusion\(.*kind=kLoop", text)
    assert max(kernel.count("bf16[512,512]") for kernel in kernels) == 3


def test_rms_norm_adds_epsilon():
    np.testing.assert_allclose(RMSNorm(epsilon=1.0, norm=4)(jnp.ones(4)), 1 / np.sqrt(2), rtol=1e-6)


def test_in_use_casts_to_dtype():
    param = matrix(Init(jax.random.key(0)), fan_in=4, model=4, ffn=6)
    used = in_use(param, Sharder(small_mesh()), jnp.bfloat16)
    np.testing.assert_array_equal(used, param[...].astype(jnp.bfloat16))


NAMES = {"query", "key", "value", "attention_projected", "mlp_gate", "mlp_up", "residual"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_remat_policy_saves_named_tensor(name):
    """A tensor saved by name adds one [L, ...] array to the residuals of the scan over layers."""
    model = small_model()
    params, (tokens, positions) = small_params(model), small_inputs(model)

    def num_residuals(policy):
        def remat(layer):
            return jax.checkpoint(layer, policy=policy)

        def total(params):
            return run(params, model, tokens, positions, remat=remat)[0].sum()

        return len(jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(total, p)[1], params)))

    text = str(jax.make_jaxpr(lambda p: run(p, model, tokens, positions)[0])(params))
    assert f"name={name}]" in text or f"name[name={name}" in text
    if name != "residual":  # the layer input is saved anyway
        assert num_residuals(jax.checkpoint_policies.save_only_these_names(name)) > num_residuals(
            jax.checkpoint_policies.nothing_saveable
        )


def test_weights_are_gathered_in_the_compute_dtype():
    """Every weight of the layer is cast before the sharding constraint that gathers it."""
    model = dataclasses.replace(small_model(), tie_embeddings=False)
    params, (tokens, positions) = small_params(model), small_inputs(model)
    mesh = small_mesh(context=2, tensor=2)

    def forward(params):
        return run(params, model, tokens, positions, mesh=mesh, compute_dtype=jnp.bfloat16)

    jaxpr = str(jax.make_jaxpr(forward)(params))
    for weight in ("16,4,6", "16,2,6", "4,6,16", "16,24", "24,16"):
        assert f"bf16[{weight}] = sharding_constraint" in jaxpr


@pytest.mark.parametrize("shape", [(2, 16), (3, 2, 8)], ids=str)
@pytest.mark.parametrize("chunk_tokens", [6, 1024])
def test_lookup_equals_indexing(shape, chunk_tokens, monkeypatch: pytest.MonkeyPatch):
    """Forward and gradient, V sharded over tensor and T over context, with and without a shorter
    last chunk.
    """
    monkeypatch.setattr("jaxlc.models.decoder._LOOKUP_CHUNK_TOKENS", chunk_tokens)
    rng = np.random.default_rng(0)
    embedding, dx = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((12, 6), (*shape, 6))
    )
    tokens = rng.integers(0, 12, shape, dtype=np.int32)
    shard = Sharder(small_mesh(data=2, context=2, tensor=2))
    x, pull_back = jax.vjp(jax.jit(lambda e: lookup(e, tokens, shard, jnp.float32)), embedding)
    np.testing.assert_array_equal(x, embedding[tokens])
    expected = np.zeros_like(embedding)
    np.add.at(expected, tokens, dx)
    np.testing.assert_allclose(pull_back(dx)[0], expected, atol=1e-5)


def test_lookup_gathers_neither_table_nor_sequence():
    """On 4 tensor ranks no array is as large as the table, or as one sequence over all context
    ranks.
    """
    shard, num_tokens, vocab_size = Sharder(small_mesh(context=2, tensor=4)), 512, 1024
    tokens, dx = jnp.zeros((1, num_tokens), jnp.int32), jnp.zeros((1, num_tokens, 8))

    def gradient(embedding, dx):
        return jax.vjp(lambda e: lookup(e, tokens, shard, jnp.float32), embedding)[1](dx)[0]

    inputs = jax.device_put(
        (jnp.zeros((vocab_size, 8)), dx),
        (
            jax.NamedSharding(shard.mesh, P("tensor", "context")),
            jax.NamedSharding(shard.mesh, P(None, ("context", "tensor"))),
        ),
    )
    for function in (lambda e, dx: lookup(e, tokens, shard, jnp.float32), gradient):
        text = jax.jit(function).lower(*inputs).compile().as_text()
        sizes = {int(size) for size in re.findall(r"f32\[(?:1,)?(\d+),\d", text)}
        assert sizes and not sizes & {vocab_size, num_tokens}


def test_lookup_sums_gradients_of_common_token_in_float32():
    """4097 gradients of 1 for one token; bfloat16 cannot represent 4097."""
    embedding, tokens = jnp.ones((4, 2)), jnp.full((1, 4097), 3)
    shard = Sharder(small_mesh())
    gradient = jax.grad(lambda e: lookup(e, tokens, shard, jnp.bfloat16).astype(jnp.float32).sum())(
        embedding
    )
    np.testing.assert_array_equal(gradient, [[0, 0], [0, 0], [0, 0], [4097, 4097]])
