"""A custom model, loss and optimizer in the training step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlc
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.sharding.document_layout import zigzag_order
from jaxlc.step.batch import Batch
from tests.step.synthetic import (
    ROWS,
    TOKENS,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
)
from tests.tolerances import FLOAT32_PARITY, max_relative_error

VOCAB_SIZE, WIDTH = 61, 16
MESHES = [dict(), dict(context=2, tensor=2), dict(data=2, fsdp=2, context=2)]


class _Net(nnx.Module):
    """One attention layer, with attention over the sequence split on the mesh."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB_SIZE, WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens_BT, segment_ids_BT, mesh):
        x_BTD = self.embed(tokens_BT)
        q, k, v = (
            x.reshape(*x.shape[:2], 4, WIDTH // 4) for x in jnp.split(self.qkv(x_BTD), 3, axis=-1)
        )
        out_BTNH = jaxlc.attend(q, k, v, mesh=mesh, segment_ids=segment_ids_BT)
        return self.norm(x_BTD + out_BTNH.reshape(x_BTD.shape))


class _Model:
    """A Flax model; `apply` returns logits, or hidden states and the output head."""

    def __init__(self, *, returns_logits: bool):
        self.returns_logits = returns_logits
        self.graph_def = nnx.split(nnx.eval_shape(lambda: _Net(nnx.Rngs(0))))[0]

    def init(self, key):
        return nnx.to_pure_dict(nnx.state(_Net(nnx.Rngs(key))))

    def apply(self, params, batch, mesh):
        net = nnx.merge(self.graph_def, params)
        hidden_BTD = net(batch.tokens, batch.segment_ids, mesh)
        head_DV = net.embed.embedding[...].T
        return hidden_BTD @ head_DV if self.returns_logits else (hidden_BTD, head_DV)


def cross_entropy(logits_tV, targets_t):
    return optax.softmax_cross_entropy_with_integer_labels(logits_tV, targets_t)


def label_smoothing(logits_tV, targets_t):
    return 0.9 * cross_entropy(logits_tV, targets_t) - 0.1 * jax.nn.log_softmax(logits_tV).mean(-1)


def _loss_and_gradients(step, params):
    loss, gradients, *_ = jax.jit(step.objective.loss_and_grads)(
        put_params(step, params), make_batch(step, natural_rows())
    )
    return loss, gradients


def _reference(params, loss):
    """Weighted sum of the losses of the custom model on one device, and its gradients, without the
    training step.
    """
    rows = {name: np.stack([row[name] for row in natural_rows()]) for name in natural_rows()[0]}
    batch, mesh = Batch(**rows), jaxlc.make_mesh(devices=jax.devices()[:1])

    def total(params):
        logits_BTV = _Model(returns_logits=True).apply(params, batch, mesh)
        losses = loss(logits_BTV.reshape(-1, VOCAB_SIZE), batch.targets.reshape(-1))
        return (losses * batch.loss_weights.reshape(-1)).sum()

    return jax.jit(jax.value_and_grad(total))(params)


@pytest.mark.parametrize(
    ("axes", "returns_logits", "loss"),
    [
        (MESHES[0], True, None),
        (MESHES[0], False, label_smoothing),
        (MESHES[1], True, label_smoothing),
        (MESHES[1], False, None),
        (MESHES[2], False, label_smoothing),
    ],
    ids=[
        "alone-logits",
        "alone-head-smoothed",
        "split-logits-smoothed",
        "split-head",
        "replicated-head-smoothed",
    ],
)
def test_custom_model_has_loss_and_gradients_of_plain_jax(axes, returns_logits, loss):
    step = small_step(
        small_config(mesh=axes), model=_Model(returns_logits=returns_logits), loss=loss
    )
    params = _Model(returns_logits=True).init(jax.random.key(1))
    value, gradients = _loss_and_gradients(step, params)
    expected_value, expected = _reference(params, loss or cross_entropy)
    np.testing.assert_allclose(value, expected_value, rtol=FLOAT32_PARITY)
    errors = jax.tree.map(max_relative_error, gradients, expected)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


def test_custom_loss_on_decoder_equals_built_in_cross_entropy():
    """The vocabulary of 61 is padded to 62 for tensor=2."""
    config = small_config(mesh=dict(context=2, tensor=2))
    built_in, custom = (small_step(config, loss=loss) for loss in (None, cross_entropy))
    params = built_in.init().params
    (value, gradients), (custom_value, custom_gradients) = (
        _loss_and_gradients(step, params) for step in (built_in, custom)
    )
    np.testing.assert_allclose(custom_value, value, rtol=FLOAT32_PARITY)
    errors = jax.tree.map(max_relative_error, custom_gradients, gradients)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


def test_custom_optimizer_equal_to_config_gives_same_step():
    config = small_config(
        mesh=dict(context=2), optimizer=dict(schedule="constant", warmup_steps=0, max_grad_norm=0.0)
    )
    settings = config.optimizer
    built_in = small_step(config)

    def is_matrix(_params):
        return jax.tree.map(
            lambda names: "norm" not in names, built_in.dims, is_leaf=lambda x: isinstance(x, tuple)
        )

    adamw = optax.inject_hyperparams(optax.adamw, static_args=("mask",))(
        settings.learning_rate,
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        mask=is_matrix,
    )
    custom = small_step(config, optimizer=adamw)
    results = [
        step.jitted(step.init(), make_batch(step, natural_rows())) for step in (built_in, custom)
    ]
    (state, metrics), (custom_state, custom_metrics) = results
    assert (
        float(custom_metrics.learning_rate)
        == pytest.approx(settings.learning_rate)
        == float(metrics.learning_rate)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8),
        custom_state.params,
        state.params,
    )


def test_custom_optimizer_without_learning_rate_reports_nan():
    step = small_step(small_config(), optimizer=optax.sgd(0.1))
    assert np.isnan(step.jitted(step.init(), make_batch(step, natural_rows()))[1].learning_rate)


def test_custom_params_are_sharded_over_fsdp_and_context():
    step = small_step(
        small_config(mesh=dict(fsdp=2, context=2)), model=_Model(returns_logits=False)
    )
    sharding = step.abstract_state.params["qkv"]["kernel"].sharding
    assert sharding.shard_shape((WIDTH, 3 * WIDTH)) == (WIDTH, 3 * WIDTH // 4)
    assert step.abstract_state.opt_state[1][0].mu["qkv"]["kernel"].sharding == sharding


@pytest.mark.parametrize(
    ("custom", "settings", "message"),
    [
        (
            dict(model=_Model(returns_logits=True)),
            dict(memory=dict(optimizer="host")),
            "memory.optimizer='host'",
        ),
        (
            dict(optimizer=optax.sgd(1.0)),
            dict(memory=dict(parameters="host")),
            "memory.parameters='host'",
        ),
        (
            dict(model=_Model(returns_logits=True)),
            dict(precision=dict(compute="fp8")),
            "precision.compute='fp8'",
        ),
        (dict(loss=cross_entropy), dict(train=dict(z_loss=1e-4)), "train.z_loss=0.0001"),
    ],
)
def test_build_step_unsupported_combination_names_setting(custom, settings, message):
    with pytest.raises((Unsupported, UserError), match=message):
        small_step(small_config(**settings), **custom)


@pytest.mark.parametrize("argument", ["model", "optimizer"])
def test_custom_argument_without_methods_raises(argument):
    with pytest.raises(
        UserError, match=f"invalid {argument} 0.1: expected an object with methods init and "
    ):
        small_step(small_config(), **{argument: 0.1})


@pytest.mark.parametrize("returns_logits", [True, False], ids=["logits", "hidden"])
def test_custom_loss_with_wrong_output_shape_raises(returns_logits):
    step = small_step(
        small_config(),
        model=_Model(returns_logits=returns_logits),
        loss=lambda *x: cross_entropy(*x).mean(),
    )
    with pytest.raises(
        UserError, match=r"the loss returned shape \(\): expected one loss per token, \("
    ):
        step.lower()


def test_custom_optimizer_with_masked_state_is_sharded():
    """As with `optax.multi_transform` and `optax.contrib.muon`: a part has placeholders for the
    other parameters.
    """

    def labels(params):
        return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "other", params)

    optimizer = optax.multi_transform(
        {"matrix": optax.adam(1e-3), "other": optax.sgd(1e-2, momentum=0.9)}, labels
    )
    config = small_config(mesh=dict(fsdp=2))
    step = small_step(config, model=_Model(returns_logits=True), optimizer=optimizer)
    mu = step.abstract_state.opt_state.inner_states["matrix"].inner_state[0].mu
    assert mu["qkv"]["kernel"].sharding == step.abstract_state.params["qkv"]["kernel"].sharding
    assert not mu["qkv"]["kernel"].sharding.is_fully_replicated
    _, metrics = step.jitted(step.init(), make_batch(step, natural_rows()))
    assert metrics.is_finite


def test_custom_model_with_wrong_output_shape_raises():
    class Wrong(_Model):
        def apply(self, params, batch, mesh):
            return super().apply(params, batch, mesh)[..., :-1]

    step = small_step(small_config(), model=Wrong(returns_logits=True))
    with pytest.raises(
        UserError,
        match=rf"returned \({ROWS}, {TOKENS}, 60\): expected logits \({ROWS}, {TOKENS}, 61\)",
    ):
        step.lower()


def test_zigzag_model_gets_tokens_in_zigzag_order():
    model = _Model(returns_logits=True)
    step = small_step(small_config(mesh=dict(context=2)), model=model)
    (row, *_) = natural_rows()
    assert (step.sequence_order.of(row) == np.arange(TOKENS)).all()
    model.token_order = "zigzag"
    zigzag = dataclasses.replace(step)
    np.testing.assert_array_equal(zigzag.sequence_order.of(row), zigzag_order(TOKENS, 2))
