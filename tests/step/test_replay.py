"""Replay of recorded experts in the training step."""

import jax
import numpy as np
import pytest

from jaxlc.models import decoder
from jaxlc.models.contract import CHOICE
from jaxlc.sharding.document_layout import natural_order
from tests.step.synthetic import make_batch, natural_rows, small_config, small_step

EXPERTS = dict(experts=dict(num_experts=8, experts_per_token=2, ffn_dim=24, renormalize=True))
DENSE_BETWEEN = dict(
    layer_kinds=("full", "dense"), kinds=dict(dense=dict(feed_forward="dense")), num_layers=3
)
TOPK_SOFTMAX = dict(
    activation="clamped_swiglu",
    experts=dict(num_experts=8, experts_per_token=2, ffn_dim=24, router="topk_softmax", bias=True),
)
SIGMOID = DENSE_BETWEEN | dict(
    experts=dict(
        num_experts=8,
        experts_per_token=2,
        ffn_dim=24,
        router="sigmoid",
        choice_bias=True,
        groups=4,
        groups_per_token=2,
        scale=1.5,
        renormalize=True,
        shared_ffn_dim=16,
    )
)


def step_of(axes=(), memory=(), model=EXPERTS, *, replays=True, **attention):
    config = small_config(
        model=dict(model),
        mesh=dict(axes),
        memory=dict(memory),
        attention=attention,
        train=dict(balance_loss=0.5, router_z_loss=0.1),
        posttrain=dict(loss="dapo", replay_routing=replays),
    )
    return small_step(config)


def policy_rows():
    """Each document is an answer with an advantage; documents 2 and 3 of the second row continue 1."""
    rows = natural_rows()
    for row in rows:
        segments = row["segment_ids"]
        row["advantages"] = np.where(segments % 2, 1.0, -0.5).astype(np.float32)
        row["answer_weights"] = np.full(len(segments), 0.1, np.float32)
        row["prefix_ids"] = np.zeros(len(segments), np.int32)
    rows[1]["prefix_ids"][np.isin(rows[1]["segment_ids"], (2, 3))] = 1
    return rows


def params_of(step):
    """Initial parameters with biases that are not 0."""
    rng = np.random.default_rng(0)
    params = jax.device_get(step.init().params)
    params = jax.tree.map_with_path(
        lambda path, x: rng.standard_normal(x.shape, np.float32) if "bias" in path[-1].key else x,
        params,
    )
    return jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), params, step.abstract_state.params
    )


def chosen_experts(step, params, rows) -> list[np.ndarray]:
    """The experts that routers choose, uint8 [S, L, k] of each row in natural order."""

    def chosen(params, batch):
        part = jax.tree.map(lambda x: x[0], batch)
        params = decoder.Params(params)
        return step.objective._hidden_and_head(params, part, routing="record")[-1][CHOICE]

    chosen_LBTk = np.asarray(jax.jit(chosen)(params, make_batch(step, rows)))
    orders = [natural_order(step.sequence_order.of(row)) for row in rows]
    return [
        np.moveaxis(chosen_LBTk[:, i, order], 0, 1).astype(np.uint8)
        for i, order in enumerate(orders)
    ]


def results(run, step, params, rows, experts=None):
    """Gradients and sums on the host."""
    rows = rows if experts is None else [{**row, "experts": x} for row, x in zip(rows, experts)]
    batch = make_batch(step, rows)
    return jax.device_get(run(params, batch))


def differing(a, b) -> list[str]:
    """The arrays that are not bitwise equal."""
    equal = jax.tree.map(lambda x, y: np.array_equal(x, y, equal_nan=True), a, b)
    return [jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path(equal) if not x]


CASES = [
    ({}, dict(remat="full"), EXPERTS, {}),
    (dict(context=4, tensor=2), dict(remat="full"), SIGMOID, {}),
    (dict(context=2, tensor=2, fsdp=2), dict(remat="attention"), TOPK_SOFTMAX, {}),
    (dict(context=2, tensor=2), dict(remat="full", tile_tokens=24), SIGMOID, {}),
    (dict(context=4), dict(remat="none"), DENSE_BETWEEN | EXPERTS, dict(shared_prefixes=True)),
    (dict(fsdp=4), dict(remat="full", layers_per_remat_group=2, optimizer="host"), EXPERTS, {}),
]


@pytest.mark.parametrize(
    ("axes", "memory", "model", "attention"),
    [
        pytest.param(*case, marks=[] if index == 2 else pytest.mark.full)
        for index, case in enumerate(CASES)
    ],
    ids=str,
)
def test_replay_of_the_own_choice_equals_none_bitwise(axes, memory, model, attention):
    """Also where half of the tokens have no record. A shift by one token, and a swap of two layers,
    change the gradients.
    """
    rows, step = policy_rows(), step_of(axes, memory, model, **attention)
    params = params_of(step)
    plain, whole = (
        step_of(axes, memory | sizes, model, replays=False, **attention)
        for sizes in ({}, dict(tile_tokens=0))
    )
    run, run_plain = (jax.jit(x.objective.loss_and_grads) for x in (step, plain))
    experts = chosen_experts(whole, params, rows)
    without = results(run_plain, plain, params, rows)
    assert differing(results(run, step, params, rows, experts), without) == []
    partial = [
        np.where(np.arange(len(x))[:, None, None] % 2, x, 255).astype(np.uint8) for x in experts
    ]
    assert differing(results(run, step, params, rows, partial), without) == []
    for wrong in ([np.roll(x, 1, axis=0) for x in experts], [x[:, ::-1] for x in experts]):
        assert len(differing(results(run, step, params, rows, wrong), without)) > 10
