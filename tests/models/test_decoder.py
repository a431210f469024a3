"""The decoder: published sizes, a float64 reference Llama, meshes, padding, gradients."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlc.config.flops import num_params
from jaxlc.config.models.model_schema import KindConfig, RopeConfig
from jaxlc.config.models.presets import PRESETS
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.models import decoder
from jaxlc.sharding.rules import is_vector, storage_spec
from tests.core.test_flops import PUBLISHED
from tests.models.small import (
    B,
    T,
    plain_llama,
    run,
    small_inputs,
    small_mesh,
    small_model,
    small_params,
)
from tests.tolerances import FLOAT32_PARITY, max_relative_error

VARIANTS = {
    "tied": dict(),
    "untied": dict(
        attention=dict(qk_norm="head"),
        tie_embeddings=False,
        rope=RopeConfig(
            scaling="llama3",
            factor=8.0,
            original_tokens=32,
        ),
    ),
    "gemma": dict(
        attention=dict(qk_norm="head", query_scale_dim=24, window=5),
        norm_placement="pre_and_post",
        zero_centered_norm=True,
        activation="gelu_tanh",
        scale_embeddings=True,
        num_layers=5,
        layer_kinds=("full", "sliding", "nope"),
        rope=RopeConfig(
            sliding_theta=50.0,
            scaling="llama3",
            factor=8.0,
            original_tokens=32,
        ),
    ),
    "shapes": dict(
        attention=dict(qk_norm="head", window=5),
        num_layers=7,
        layer_kinds=("sliding", "wide", "sliding"),
        kinds=(KindConfig(name="wide", num_heads=2, num_kv_heads=1, head_dim=10, ffn_dim=40),),
    ),
    "olmo": dict(
        attention=dict(qk_norm="projection", qkv_bias=True),
        norm_placement="post",
        embedding_multiplier=1.5,
        residual_multiplier=0.4,
        logits_scaling=1.7,
    ),
    "odd": dict(
        attention=dict(
            num_kv_heads=1, sinks=True, gate=True, qkv_bias=True, out_bias=True, window=5
        ),
        tie_embeddings=False,
        vocab_size=29,
        num_layers=3,
        mlp_bias=True,
        layer_kinds=("sliding", "full"),
        rope=RopeConfig(
            fraction=2 / 3,
            sliding_scaling=True,
            scaling="yarn",
            factor=4.0,
            original_tokens=32,
            truncate=False,
        ),
    ),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_preset_has_published_parameter_count(preset):
    model = PRESETS[preset]
    params = decoder.abstract_params(model, model.vocab_size)
    assert sum(x.size for x in jax.tree.leaves(params)) == PUBLISHED[preset]


def test_every_preset_except_tiny_has_a_published_count():
    assert set(PRESETS) == {*PUBLISHED, "tiny"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_dims_of_names_every_parameter_dimension(variant):
    model = small_model(**VARIANTS[variant])
    params, dims = decoder.abstract_params(model, model.vocab_size), decoder.dims_of(model)

    def check(path, param, names):
        own = model.layer_config(path[1].key) if "shapes" in variant and len(path) > 2 else model
        sizes = dict(
            model=16,
            heads=own.attention.num_heads,
            kv_heads=own.attention.num_kv_heads,
            head_dim=own.attention.query_dim if path[-1].key == "wq" else own.attention.head_dim,
            ffn=own.ffn_dim,
            ffn_bias=own.ffn_dim,
            sinks=own.attention.num_heads,
            vocab=model.vocab_size,
        )
        assert all(
            sizes.get(name, size) == size for name, size in zip(names, param.shape, strict=True)
        )
        assert (names[-1] in ("norm", "bias", "ffn_bias", "sinks")) == is_vector(names)

    jax.tree.map_with_path(check, params, dims)
    assert sum(x.size for x in jax.tree.leaves(params)) == num_params(model)
    num_stacked = 0
    for path, layers in model.layer_stacks.items():
        stack, stack_dims = (
            functools.reduce(operator.getitem, path, tree) for tree in (params, dims)
        )
        assert stack_dims["attention"]["wq"] == ("layers", "model", "heads", "head_dim")
        assert {len(param) for param in jax.tree.leaves(stack)} == {len(layers)}
        num_stacked += len(layers)
    assert num_stacked == model.num_layers


def _step(model, **options):
    """Jitted: (params, inputs) -> (gradients, (x_BTD, head_DV)); the objective depends on every
    parameter entry.
    """

    def objective(params, inputs):
        x_BTD, head_DV = run(params, model, *inputs, **options)
        logits_BTV = (x_BTD @ head_DV)[..., : model.vocab_size].astype(jnp.float32)
        return jnp.sin(logits_BTV).sum(), (x_BTD, head_DV)

    return jax.jit(jax.grad(objective, has_aux=True))


@functools.cache
def _on_one_device(variant):
    """(model, params, inputs, step, step(params, inputs))"""
    model = small_model(**VARIANTS[variant])
    params, inputs, step = small_params(model), small_inputs(model), _step(model)
    return model, params, inputs, step, step(params, inputs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_apply_equals_float64_reference(variant):
    model, params, inputs, _, (gradients, (x_BTD, head_DV)) = _on_one_device(variant)
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


@pytest.mark.parametrize(
    "variant, axes",
    [
        ("tied", dict(context=2, tensor=2, fsdp=2)),
        ("untied", dict(context=2, tensor=4)),  # tensor exceeds the 2 key/value heads
        ("odd", dict(data=2, context=4)),
        ("olmo", dict(context=2, tensor=4)),  # the norm spans tensor ranks
    ],
    ids=str,
)
def test_apply_on_mesh_equals_one_device(variant, axes):
    model, params, inputs, _, (gradients, (x_BTD, _)) = _on_one_device(variant)
    mesh = small_mesh(**axes)
    got, (got_BTD, got_DV) = _step(model, mesh=mesh)(_stored(params, model, mesh), inputs)
    assert max_relative_error(got_BTD, x_BTD) <= FLOAT32_PARITY
    assert got_BTD.sharding.is_equivalent_to(
        jax.NamedSharding(mesh, P(BATCH_AXES, (CONTEXT, TENSOR), None)), 3
    )
    assert got_DV.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(None, TENSOR)), 2)
    errors = jax.tree.map(max_relative_error, got, gradients)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


@pytest.mark.parametrize("changed", [0, 7, T - 1])
def test_apply_is_causal(changed):
    model, params, (tokens, positions), step, (_, (x_BTD, _)) = _on_one_device("tied")
    other = tokens.copy()
    other[:, changed] = (other[:, changed] + 1) % model.vocab_size
    _, (got_BTD, _) = step(params, (other, positions))
    np.testing.assert_array_equal(got_BTD[:, :changed], x_BTD[:, :changed])
    assert (got_BTD[:, changed:] != x_BTD[:, changed:]).any(axis=(0, 2)).all()


def test_apply_in_bfloat16_is_close_to_float32():
    model, params, inputs, _, (gradients, (x_BTD, _)) = _on_one_device("tied")
    got, (got_BTD, got_DV) = _step(model, compute_dtype=jnp.bfloat16)(params, inputs)
    assert got_BTD.dtype == got_DV.dtype == jnp.bfloat16
    assert max_relative_error(got_BTD.astype(jnp.float32), x_BTD) < 0.05
    assert {g.dtype for g in jax.tree.leaves(got)} == {jnp.dtype(jnp.float32)}


def test_apply_with_vocab_padding_has_equal_results():
    """Equal hidden states, and zero gradient for the padding."""
    model, params, inputs, step, (gradients, (x_BTD, _)) = _on_one_device("odd")
    padding = dict(embedding=[(0, 3), (0, 0)], head=[(0, 0), (0, 3)])
    padded = {**params, **{name: np.pad(params[name], widths) for name, widths in padding.items()}}
    got, (got_BTD, got_DV) = step(padded, inputs)
    np.testing.assert_allclose(got_BTD, x_BTD, rtol=1e-6)
    assert got_DV.shape == (16, 32)
    for name, widths in padding.items():
        assert max_relative_error(got[name], np.pad(gradients[name], widths)) <= FLOAT32_PARITY
    assert (got["embedding"][29:] == 0).all() and (got["head"][:, 29:] == 0).all()


def test_init_is_independent_of_mesh_and_padding():
    model, key = small_model(vocab_size=61, model_dim=64, tie_embeddings=False), jax.random.key(3)
    mesh, dims = small_mesh(fsdp=2, context=2, tensor=2), decoder.dims_of(model)
    shardings = jax.tree.map(
        lambda x, names: jax.NamedSharding(mesh, storage_spec(names, x.shape, mesh)),
        decoder.abstract_params(model, 64),
        dims,
    )
    split = jax.jit(lambda: decoder.init(model, 64, key), out_shardings=shardings)()
    whole = jax.jit(lambda: decoder.init(model, 61, key))()
    assert split["embedding"].shape == (64, 64) and (split["embedding"][61:] == 0).all()
    assert split["head"].shape == (64, 64) and (split["head"][:, 61:] == 0).all()

    def compare(a, b):
        a = np.asarray(a)[tuple(slice(size) for size in b.shape)]
        # the compiled programs differ in the last bits
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)

    jax.tree.map(compare, split, whole)
    w_up_LDF = whole["layers"]["mlp"]["w_up"]
    assert (w_up_LDF[0] != w_up_LDF[1]).any()  # layers have different values
    # Normed hidden states give logits of unit variance, so the initial loss is near log(V).
    assert float(whole["head"].std()) == pytest.approx(64**-0.5, rel=0.05)
