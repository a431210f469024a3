"""The decoder: published sizes, a plain float64 Llama, meshes, padding, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlc.config.presets import PRESETS
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.models import decoder
from jaxlc.sharding.rules import Sharder, storage_spec
from tests.models.small import B, T, plain_llama, run, small_inputs, small_mesh, small_model, small_params
from tests.tolerances import FLOAT32_PARITY, max_relative_error

PUBLISHED = {
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_248_023_552,
}
VARIANTS = {
    "tied": dict(tie_embeddings=True),
    "untied": dict(tie_embeddings=False),
    "qk_norm": dict(qk_norm=True),
    "rope_scaling": dict(rope_scaling_factor=8.0, rope_scaling_original_tokens=32),
    "one_kv_head": dict(num_kv_heads=1),
    "odd_vocabulary": dict(vocab_size=31, tie_embeddings=False),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_parameter_count_is_the_published_one(preset):
    model = PRESETS[preset]
    params = decoder.abstract_params(model, model.vocab_size)
    assert sum(x.size for x in jax.tree.leaves(params)) == PUBLISHED[preset]


def test_every_preset_but_tiny_is_counted():
    assert set(PRESETS) == {*PUBLISHED, "tiny"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_dims_name_every_parameter(variant):
    model = small_model(**VARIANTS[variant])
    sizes = dict(
        model=16, heads=4, kv_heads=model.num_kv_heads, head_dim=6, ffn=24, vocab=model.vocab_size, layers=2
    )
    params, dims = decoder.abstract_params(model, model.vocab_size), decoder.dims_of(model)

    def check(param, names):
        assert all(sizes.get(name, size) == size for name, size in zip(names, param.shape, strict=True))
        assert (names[-1] == "norm") == ("norm" in names)

    jax.tree.map(check, params, dims)
    assert dims["layers"]["attention"]["wq"] == ("layers", "model", "heads", "head_dim")


def _step(model, inputs, **options):
    """Jitted: params -> (gradients of a scalar that every part of every parameter moves, (x_BTD, head_DV))."""

    def objective(params):
        x_BTD, head_DV = run(params, model, *inputs, **options)
        logits_BTV = (x_BTD @ head_DV)[..., : model.vocab_size].astype(jnp.float32)
        return jnp.sin(logits_BTV).sum(), (x_BTD, head_DV)

    return jax.jit(jax.grad(objective, has_aux=True))


@functools.cache
def _on_one_device(variant):
    """(model, params, inputs, (gradients, (x_BTD, head_DV)))"""
    model = small_model(**VARIANTS[variant])
    params, inputs = small_params(model), small_inputs(model)
    return model, params, inputs, _step(model, inputs)(params)


@pytest.mark.parametrize("variant", VARIANTS)
def test_against_a_plain_float64_llama(variant):
    model, params, inputs, (gradients, (x_BTD, head_DV)) = _on_one_device(variant)
    wanted_BTD, wanted_BTV = plain_llama(params, model, *inputs)
    assert x_BTD.shape == (B, T, 16) and x_BTD.dtype == jnp.float32
    assert max_relative_error(x_BTD, wanted_BTD) <= FLOAT32_PARITY
    assert max_relative_error(x_BTD @ head_DV, wanted_BTV) <= FLOAT32_PARITY
    for path, g in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(g).all() and (g != 0).any(), path


def _stored(params, model, mesh):
    def put(x, names):
        return jax.device_put(x, jax.NamedSharding(mesh, storage_spec(names, x.shape, mesh)))

    return jax.tree.map(put, params, decoder.dims_of(model))


@pytest.mark.parametrize("variant, axes", [
    ("tied", dict(context=2, tensor=2, fsdp=2)),
    ("tied", dict(context=8)),
    ("untied", dict(context=2, tensor=4)),  # tensor exceeds the 2 key/value heads
    ("odd_vocabulary", dict(data=2, tensor=2)),
], ids=str)
def test_output_and_gradient_do_not_depend_on_the_mesh(variant, axes):
    model, params, inputs, (gradients, (x_BTD, _)) = _on_one_device(variant)
    mesh = small_mesh(**axes)
    got, (got_BTD, got_DV) = _step(model, inputs, mesh=mesh)(_stored(params, model, mesh))
    assert max_relative_error(got_BTD, x_BTD) <= FLOAT32_PARITY
    assert got_BTD.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(BATCH_AXES, (CONTEXT, TENSOR), None)), 3)
    vocab_axis = TENSOR if model.vocab_size % axes.get(TENSOR, 1) == 0 else None
    assert got_DV.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(None, vocab_axis)), 2)
    errors = jax.tree.map(max_relative_error, got, gradients)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


@pytest.mark.parametrize("changed", [0, 7, T - 1])
def test_causality(changed):
    model, params, (tokens, positions), (_, (x_BTD, _)) = _on_one_device("tied")
    other = tokens.copy()
    other[:, changed] = (other[:, changed] + 1) % model.vocab_size
    _, (got_BTD, _) = _step(model, (other, positions))(params)
    np.testing.assert_array_equal(got_BTD[:, :changed], x_BTD[:, :changed])
    assert (got_BTD[:, changed:] != x_BTD[:, changed:]).any(axis=(0, 2)).all()


def test_bfloat16_runs_and_stays_near():
    model, params, inputs, (_, (x_BTD, _)) = _on_one_device("tied")
    gradients, (got_BTD, got_DV) = _step(model, inputs, compute_dtype=jnp.bfloat16)(params)
    assert got_BTD.dtype == got_DV.dtype == jnp.bfloat16
    assert max_relative_error(got_BTD.astype(jnp.float32), x_BTD) < 0.03
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_padding_of_the_vocabulary_changes_nothing(variant):
    """Same first values, zeros after them, same hidden states, no gradient."""
    model, params, inputs, (_, (x_BTD, _)) = _on_one_device(variant)
    padded = small_params(model, vocab_size_padded=32)
    assert padded["embedding"].shape == (32, 16) and (padded["embedding"][29:] == 0).all()

    def cut(x, like):
        return x[tuple(slice(size) for size in like.shape)]

    jax.tree.map(lambda a, b: np.testing.assert_array_equal(cut(a, b), b), padded, params)
    gradients, (got_BTD, got_DV) = _step(model, inputs)(padded)
    np.testing.assert_array_equal(got_BTD, x_BTD)
    assert got_DV.shape == (16, 32) and (got_DV[:, 29:] == 0).all()
    assert (gradients["embedding"][29:] == 0).all()


def test_init_does_not_depend_on_the_mesh():
    model = small_model()
    mesh = small_mesh(fsdp=2, context=2, tensor=2)
    dims, key = decoder.dims_of(model), jax.random.key(3)
    abstract = decoder.abstract_params(model, 30)
    shardings = jax.tree.map(
        lambda x, names: jax.NamedSharding(mesh, storage_spec(names, x.shape, mesh)), abstract, dims
    )
    split = jax.jit(lambda: decoder.init(model, 30, key), out_shardings=shardings)()
    whole = jax.jit(lambda: decoder.init(model, 30, key))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), split, whole)
    assert (whole["layers"]["mlp"]["w_up"][0] != whole["layers"]["mlp"]["w_up"][1]).any()  # layers differ


def test_the_first_residual_stream_is_of_unit_size():
    """Final hidden states are normed; the logits of an untrained model are near 0 to 1, its loss near log(V)."""
    model = small_model(vocab_size=512, model_dim=64, tie_embeddings=False)
    tokens, positions = small_inputs(model)
    x_BTD, head_DV = jax.jit(lambda key: run(decoder.init(model, 512, key), model, tokens, positions))(jax.random.key(0))
    assert 0.8 < float(jnp.std(x_BTD @ head_DV)) < 1.2


def test_a_common_token_has_its_gradient_summed_in_float32():
    """4096 gradients of 1 for one token: a bfloat16 sum stops at 256."""
    embedding, tokens = jnp.ones((4, 2)), jnp.full((1, 4096), 3)
    shard = Sharder(small_mesh())
    gradient = jax.grad(lambda e: decoder.lookup(e, tokens, shard, jnp.bfloat16).astype(jnp.float32).sum())(embedding)
    np.testing.assert_array_equal(gradient, [[0, 0], [0, 0], [0, 0], [4096, 4096]])
