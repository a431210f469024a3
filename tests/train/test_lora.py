"""LoRA and frozen parameters: gradients on meshes, and what the compiled step computes."""

import functools
import math
import re

import jax
import numpy as np
import pytest

from jaxlc.config.kinds import projection_paths
from jaxlc.core.errors import UserError
from tests.step.synthetic import (
    gradients_and_loss,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
    without_padding,
)
from tests.tolerances import FLOAT32_PARITY, max_relative_error

LORA = dict(rank=4, alpha=6.0)
SCALE = 1.5
FLOAT32 = dict(compute="fp32", frozen="fp32")
# Two layers of different shapes per iteration of the loop and a last one; embeddings and norms are trained, as in
# LongLoRA.
KINDS = dict(
    num_layers=3, layer_kinds=("sliding", "full"), window=20, qk_norm="head", qkv_bias=True
)
KINDS |= dict(kinds=dict(full=dict(num_heads=2, head_dim=12, ffn_dim=96)))
KINDS |= dict(attention_gate=True, attention_sinks=True, attention_out_bias=True)
KINDS |= dict(mlp_bias=True, residual_multiplier=0.4, logits_scaling=1.7)
KINDS_TRAINABLE = ("embedding", "*norm*")


def lora_step(lora=LORA, precision=FLOAT32, **sections):
    return small_step(small_config(lora=lora, precision=precision, **sections))


def flat(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves
    }


def nested(leaves: dict) -> dict:
    tree: dict = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        part = tree
        for key in parents:
            part = part.setdefault(key, {})
        part[last] = leaf
    return tree


def adapters_of(leaves: dict[str, np.ndarray]):
    """(name of the projection's weight, name of its adapter) for every adapter in every stack."""
    for name in leaves:
        if "/lora/" in name and name.endswith("/a"):
            adapter = name.removesuffix("/a")
            param, block = (
                projection_paths()[adapter.rpartition("/")[2]][0],
                adapter.partition("/lora/")[0],
            )
            yield f"{block}/{param.partition('/')[2]}", adapter


def merged(leaves: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """The parameters of the model without LoRA that computes the same: w + scale a b."""
    result = {name: x for name, x in leaves.items() if "/lora/" not in name}
    for weight, adapter in adapters_of(leaves):
        layer_pairs = zip(leaves[f"{adapter}/a"], leaves[f"{adapter}/b"])
        result[weight] = result[weight] + scale * np.stack(
            [np.tensordot(a, b, axes=1) for a, b in layer_pairs]
        )
    return result


def gradients_of(step, params):
    gradients, loss = jax.jit(gradients_and_loss(step))(
        put_params(step, params), make_batch(step, natural_rows())
    )
    return flat(gradients), loss


@functools.cache
def reference(has_kinds: bool):
    """(parameters, gradients, loss) by the chain rule from the gradients of the merged weights,
    without LoRA.
    """
    model = KINDS if has_kinds else {}
    leaves = flat(lora_step(model=model).init().params)
    rng = np.random.default_rng(0)
    for name in leaves:
        if name.endswith("/b"):  # initially 0
            leaves[name] = rng.normal(size=leaves[name].shape).astype(np.float32) / 4
    gradients, loss = gradients_of(
        small_step(small_config(model=model)), nested(merged(leaves, SCALE))
    )
    expected = {
        name: x
        for name, x in gradients.items()
        if has_kinds and ("norm" in name or name == "embedding")
    }
    for weight, adapter in adapters_of(leaves):
        a_L, b_L = leaves[f"{adapter}/a"], leaves[f"{adapter}/b"]
        num_inputs = a_L.ndim - 2
        inputs, outputs = range(num_inputs), range(num_inputs, gradients[weight].ndim - 1)
        da, db = [], []
        for a, b, dw in zip(a_L, b_L, gradients[weight]):
            da.append(SCALE * np.tensordot(dw, b, (outputs, range(1, b.ndim))))
            db.append(SCALE * np.tensordot(a, dw, (inputs, inputs)))
        expected |= {f"{adapter}/a": np.stack(da), f"{adapter}/b": np.stack(db)}
    return nested(leaves), expected, loss


CASES = {
    "accumulation": dict(train=dict(gradient_accumulation_steps=2), memory=dict(layers_per_remat_group=2)),
    "tiles": dict(mesh=dict(context=2, tensor=2), memory=dict(tile_tokens=12, remat="full")),
    "kinds": dict(model=KINDS, train=dict(trainable=KINDS_TRAINABLE)),
    "kinds_on_mesh": dict(
        model=KINDS, train=dict(trainable=KINDS_TRAINABLE), mesh=dict(fsdp=2, context=2, tensor=2)
    ),
}  # fmt: skip


_FULL = ("accumulation", "kinds", "tiles")


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.full] if x in _FULL else []) for x in CASES]
)
def test_lora_gradients_equal_chain_rule_of_merged_weights(case: str):
    params, expected, expected_loss = reference(case.startswith("kinds"))
    gradients, loss = gradients_of(lora_step(**CASES[case]), params)
    assert max_relative_error(loss, expected_loss) <= FLOAT32_PARITY
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (
            max_relative_error(without_padding(gradients[name], gradient), gradient)
            <= FLOAT32_PARITY
        ), name


# No activation has as many entries as one of these matrices.
_SIZES = dict(model_dim=40, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=72)


def _sizes_of_products(step) -> set[int]:
    """Numbers of entries of the results of matrix products, sums and scatters in the compiled step."""
    results = re.findall(
        r"= \w+\[([\d,]+)\]\S* (?:dot|scatter|add|custom-call|all-reduce)\(",
        step.compile().as_text(),
    )
    return {math.prod(map(int, dims.split(","))) for dims in results}


_TILES = pytest.param(dict(tile_tokens=24, remat="full"), marks=pytest.mark.full)


@pytest.mark.parametrize("memory", [{}, _TILES], ids=["scan", "tiles"])
def test_compiled_step_has_no_gradient_of_frozen_matrices(memory):
    lora = dict(rank=4, projections=("query", "mlp_down"))
    step = lora_step(model=_SIZES, memory=memory, lora=lora)
    params = flat(jax.tree.map(lambda x: np.broadcast_to(0, x.shape), step.abstract_state.params))
    sizes = {
        math.prod(x.shape[1:] if name.startswith("layers") else x.shape): name
        for name, x in params.items()
    }
    trained = {size for size, name in sizes.items() if "/lora/" in name}
    frozen = {size for size, name in sizes.items() if "norm" not in name} - trained
    # wq and wo, wk and wv, embedding and head, and those of the MLP, have equal sizes
    assert len(frozen) == 4
    products = _sizes_of_products(step)
    assert trained <= products and not frozen & products
    # the same program without LoRA has all of them, so that the search can find them
    if not memory:
        assert frozen <= _sizes_of_products(small_step(small_config(model=_SIZES)))


def _scan_results(jaxpr):
    """Shapes of the results of all scans in a jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield from (x.aval.shape for x in eqn.outvars)
        for param in jax.tree.leaves(
            eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(param, "eqns") or hasattr(param, "jaxpr"):
                yield from _scan_results(getattr(param, "jaxpr", param))


def test_loop_over_groups_of_layers_saves_no_copy_of_frozen_matrices():
    """Two iterations of two layers with equal shapes: the backward pass reads the stack, not copies
    of its layers.
    """
    model = _SIZES | dict(num_layers=4, layer_kinds=("sliding", "full"), window=20)

    def shapes(step):
        operands = step.abstract_state.params, step.abstract_batch
        return set(_scan_results(jax.make_jaxpr(step.objective.loss_and_grads)(*operands).jaxpr))

    assert (2, 40, 72) not in shapes(lora_step(model=model))
    # so that the search can find it
    assert (2, 40, 72) in shapes(small_step(small_config(model=model)))


def test_frozen_parameters_have_no_optimizer_state_and_do_not_change():
    """fp8 with delayed scaling: the state of frozen products is still updated."""
    precision = dict(compute="fp8", fp8_scaling="delayed", fp8_amax_history_len=2, bf16_layers=(0,))
    step = lora_step(
        precision=precision, train=dict(trainable=("final_norm/scale",), frozen=("head",))
    )
    state = step.init()
    before, num_moments = flat(state.params), len(jax.tree.leaves(state.opt_state))
    assert {name for name, x in before.items() if x.dtype != np.float32} == {
        name for name in before if "/w" in name or name in ("embedding", "head")
    }
    trained = {name for name in before if "/lora/" in name or name == "final_norm/scale"}
    assert num_moments == 2 * len(trained) + 2  # and two counts
    batch, run = make_batch(step, natural_rows()), step.jitted
    for _ in range(2):  # a is 0 times b in the first step
        state, metrics = run(state, batch)
    assert metrics.is_finite and float(metrics.grad_norm) > 0
    changed = {
        name for name, x in flat(state.params).items() if not np.array_equal(x, before[name])
    }
    assert changed == trained
    assert any(np.any(x) for x in jax.tree.leaves(state.scaling.histories))


def test_frozen_matrices_in_float16_do_not_change():
    step = lora_step(precision=dict(compute="fp16", frozen="fp16"))
    before = step.init()
    after, metrics = step.jitted(before, make_batch(step, natural_rows()))
    assert metrics.is_finite
    before, after = flat(step.init().params), flat(after.params)
    frozen = [name for name, x in before.items() if x.dtype == np.float16]
    assert "head" in frozen and not any(
        x.dtype not in (np.float16, np.float32) for x in before.values()
    )
    for name in frozen:
        np.testing.assert_array_equal(after[name], before[name])


def test_base_parameters_do_not_depend_on_adapters():
    with_lora, without = (
        flat(lora_step().init().params),
        flat(small_step(small_config()).init().params),
    )
    for name, x in without.items():
        np.testing.assert_array_equal(with_lora[name], x)


@pytest.mark.parametrize("sections, message", [
    (dict(lora=dict(projections=("querry",))), r"invalid value 'querry' for config.lora.projections: .*mean query"),
    (dict(lora=dict(rank=0, alpha=8.0)), "config.lora.alpha=8.0 has no effect without --config.lora.rank=RANK"),
    (dict(lora=dict(rank=4, projections=("expert_up",))), "names expert_up, which no layer of the model has"),
    (dict(train=dict(checkpoint_frozen=False)), "checkpoint_frozen=False has no effect, since no parameter is frozen"),
    (dict(train=dict(trainable=("*nrom*",))), r"invalid value '\*nrom\*' for config.train.trainable: .*embedding"),
    (dict(train=dict(frozen=("*",))), "config.train.frozen selects all parameters"),
    (dict(lora=LORA, train=dict(trainable=("*/wq",))), "selects layers/attention/wq, which has an adapter"),
])  # fmt: skip
def test_invalid_lora_settings_raise(sections, message):
    with pytest.raises(UserError, match=message):
        _ = small_step(small_config(**sections)).frozen
