"""FP8 products against float64 products of operands that numpy rounds."""

import functools
import operator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxlc.config.models.model_schema import KindConfig
from jaxlc.models import decoder
from jaxlc.models.block import Init
from jaxlc.models.contract import LayerTokens
from jaxlc.models.layer_stack import DecoderLayer
from jaxlc.models.matmuls import Fp8, Matmuls, fp8_product
from jaxlc.models.rope import rope_tables
from jaxlc.sharding.rules import Sharder
from tests.models import small
from tests.tolerances import FLOAT32_PARITY, max_relative_error

B, T, N, H, D = 2, 5, 3, 4, 6
# Results are float32; the products of FP8 operands are exact in float32, and so are the sums up to
# their order.
EXACT = 1e-6


# tests/conftest.py selects XLA's older code generator for JAX 0.10, which rounds to FP8
# differently.
EXACT_FP8 = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}


def operands():
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (N, H, D), (B, T, D)
    sizes = 30.0, 0.02, 1e-5
    return [
        (rng.standard_normal(shape) * size).astype(np.float32) for shape, size in zip(shapes, sizes)
    ]


def rounded(x, dtype, largest=None):
    """x rounded to FP8: scaled by a power of two so that `largest` is representable, and clipped
    there.
    """
    top = float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.ceil(np.log2((np.abs(x).max() if largest is None else largest) / top))
    return np.clip(x / scale, -top, top).astype(dtype).astype(np.float64) * scale


def product_and_gradients(x, w, dout, history):
    out, pull = jax.vjp(lambda *args: fp8_product(*args, 2), x, w, history)
    return out, *pull(dout)


@pytest.mark.jax_version
@pytest.mark.parametrize("largest", [None, (50.0, 0.5, 4e-6)], ids=["current", "delayed"])
def test_fp8_product_rounds_only_operands(largest):
    """The amax history of dout is too small here, so that delayed scaling clips dout."""
    x, w, dout = operands()
    history = None if largest is None else jnp.array(largest)[:, None] * jnp.array([0.5, 1.0, 0.0])
    got = jax.jit(product_and_gradients, compiler_options=EXACT_FP8)(x, w, dout, history)
    x_8, w_8, dout_8 = (
        rounded(value, dtype, largest and largest[row])
        for row, (value, dtype) in enumerate(
            (
                (x, ml_dtypes.float8_e4m3fn),
                (w, ml_dtypes.float8_e4m3fn),
                (dout, ml_dtypes.float8_e5m2),
            )
        )
    )
    expected = (
        np.einsum("btnh,nhd->btd", x_8, w_8),
        np.einsum("btd,nhd->btnh", dout_8, w_8),
        np.einsum("btnh,btd->nhd", x_8, dout_8),
    )
    for a, b in zip(got, expected):
        assert max_relative_error(a, b) <= EXACT
    # so operands were rounded
    assert max_relative_error(got[0], np.einsum("btnh,nhd->btd", x, w)) > 1e-3


@pytest.mark.jax_version
def test_fp8_product_gradient_of_history_is_next_history():
    x, w, dout = operands()
    history = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
    *_, got = product_and_gradients(x, w, dout, history)
    np.testing.assert_array_equal(got[:, 0], [np.abs(value).max() for value in (x, w, dout)])
    np.testing.assert_array_equal(got[:, 1:], history[:, :-1])


@pytest.mark.jax_version
@pytest.mark.parametrize("history", [None, jnp.zeros((3, 2))], ids=["current", "delayed"])
def test_fp8_product_of_zeros_and_empty_history_is_finite(history):
    x, w, dout = (jnp.zeros_like(value) for value in operands())
    for got in jax.tree.leaves(product_and_gradients(x, w, dout, history)):
        np.testing.assert_array_equal(got, jnp.zeros_like(got))


@pytest.mark.jax_version
def test_matmuls_uses_fp8_for_named_products_only():
    x, w = jnp.ones((1, 2, 4), jnp.bfloat16), jnp.ones((4, 8), jnp.bfloat16)
    matmul = Matmuls(
        Fp8(matmuls=("mlp_up", "query"), scaling="delayed", history_steps=2), "mlp_gate", "mlp_up"
    )
    for name, is_8_bits in (("mlp_gate", False), ("mlp_up", True)):
        text = str(jax.make_jaxpr(functools.partial(matmul, name, "BTD,DF->BTF"))(x, w))
        assert ("f8_e4m3fn" in text) == is_8_bits, text
    assert nnx.state(matmul)["history"].shape == (2, 3, 2)


def test_matmuls_with_unknown_name_raises():
    with pytest.raises(AssertionError):
        Matmuls(None, "mlp_gate")("query", "BTD,DF->BTF", jnp.ones((1, 2, 4)), jnp.ones((4, 8)))


# the last layer has a stack of its own
MODEL = small.small_model(num_layers=3, layer_kinds=("full", "full"))
KINDS = small.small_model(
    num_layers=3, layer_kinds=("full", "wide"), kinds=(KindConfig(name="wide", ffn_dim=40),)
)
RECIPE = dict(matmuls=("query", "mlp_down"), history_steps=2)


def hidden(params, histories=None, fp8=None, model=MODEL):
    """x_BTD after three layers, float32 except FP8 products."""
    params = decoder.Params(params, histories=histories)
    return decoder.apply(
        params, model, *small.small_inputs(model), small.context_of(model), fp8=fp8
    )[0]


def hidden_layer_by_layer(params, recipes):
    """The same with explicit layers, each with its own recipe."""
    tokens_BT, positions_BT = small.small_inputs(MODEL)
    x_BTD = params["embedding"][tokens_BT]
    stacked = jax.tree.map(
        lambda *stacks: jnp.concatenate(stacks), params["layers"], params["last_layers"]
    )
    for place, fp8 in enumerate(recipes):
        layer_def, _ = nnx.split(
            DecoderLayer(MODEL.layer_config("full"), Init(jax.random.key(0), fp8))
        )
        layer = nnx.merge(layer_def, jax.tree.map(operator.itemgetter(place), stacked))
        (x_BTD, _), _ = layer(
            x_BTD,
            LayerTokens(positions_BT),
            shard=Sharder(small.small_mesh()),
            tables=rope_tables(MODEL, "full", small.T),
            attend=lambda mixed: [small.dense_attend(*mixed[0])],
        )
    return x_BTD


def result_and_gradients(run, *operands):
    def total(*operands):
        x_BTD = run(*operands)
        return jnp.vdot(x_BTD, jnp.cos(jnp.arange(x_BTD.size))), x_BTD

    places = tuple(range(len(operands)))
    gradients, x_BTD = jax.jit(jax.grad(total, places, has_aux=True))(*operands)
    return x_BTD, gradients


def test_bf16_layers_have_no_fp8_products():
    params = small.small_params(MODEL)
    everywhere, mixed = (
        Fp8(scaling="current", bf16_layers=layers, **RECIPE) for layers in ((), (0, -1))
    )
    got = result_and_gradients(functools.partial(hidden, fp8=mixed), params)
    layer_by_layer = functools.partial(hidden_layer_by_layer, recipes=(None, everywhere, None))
    errors = jax.tree.map(max_relative_error, got, result_and_gradients(layer_by_layer, params))
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors
    for fp8 in (everywhere, None):
        assert (
            max_relative_error(jax.jit(functools.partial(hidden, fp8=fp8))(params), got[0]) > 1e-3
        )


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(MODEL, id="equal shapes"),
        pytest.param(KINDS, id="kinds", marks=pytest.mark.jax_version),
    ],
)
def test_bf16_layers_have_empty_histories(model):
    params = small.small_params(model)
    mixed = Fp8(scaling="delayed", bf16_layers=(1,), **RECIPE)
    histories = decoder.first_histories(model, mixed)
    _, (_, seen) = result_and_gradients(
        functools.partial(hidden, fp8=mixed, model=model), params, histories
    )
    for stack, layers in model.layer_stacks.items():
        blocks = jax.tree.leaves(functools.reduce(operator.getitem, stack, seen))
        assert len(blocks) == 2  # the attention and the MLP block
        for block in blocks:
            assert block[:, :, :, 0].any(axis=(1, 2)).tolist() == [layer != 1 for layer in layers]
