"""Replay of recorded experts in the training step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.generation.generator import Generator
from jaxlc.generation.sampling import Sampling
from jaxlc.models import decoder
from jaxlc.models.contract import CHOICE
from jaxlc.sharding.document_layout import natural_order
from jaxlc.step.language_model import LanguageModel
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


def policy_rows(shared_prefixes=False):
    """Each document is an answer with an advantage; with `shared_prefixes`, documents 2 and 3 of the
    second row continue 1.
    """
    rows = natural_rows()
    for row in rows:
        segments = row["segment_ids"]
        row["advantages"] = np.where(segments % 2, 1.0, -0.5).astype(np.float32)
        row["answer_weights"] = np.full(len(segments), 0.1, np.float32)
        if shared_prefixes:
            row["prefix_ids"] = np.zeros((len(segments), 1), np.int32)
    if shared_prefixes:
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
    rows, step = policy_rows(**attention), step_of(axes, memory, model, **attention)
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


MANY = dict(
    experts=dict(
        num_experts=64, experts_per_token=4, ffn_dim=16, router="sigmoid", renormalize=True
    ),
    layer_kinds=("full", "dense"),
    kinds=dict(dense=dict(feed_forward="dense")),
    num_layers=4,
)


def rows_of(prompts, answers) -> list[dict[str, np.ndarray]]:
    """A row for each answer, with the recorded log-probabilities and experts."""
    rows = []
    for prompt, answer in zip(prompts, answers):
        tokens = np.append(prompt, answer.tokens)
        end, in_loss = len(tokens) - 1, slice(len(prompt) - 1, len(tokens) - 1)
        row = {name: np.zeros_like(x) for name, x in policy_rows()[0].items()}
        row["tokens"][:end], row["targets"][:end] = tokens[:-1], tokens[1:]
        row["positions"][:end], row["segment_ids"][:end] = np.arange(end), 1
        row["experts"] = np.full((96, *answer.experts.shape[1:]), 255, np.uint8)
        row["experts"][:end] = answer.experts
        row["sampled"] = np.zeros(96, np.float32)
        row["sampled"][in_loss], row["loss_weights"][in_loss] = answer.log_probs, 1
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("axes", "memory"),
    [
        ({}, {}),
        pytest.param(dict(context=2, tensor=2), dict(tile_tokens=24), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_replay_removes_the_effect_of_noise_in_the_router_of_the_sampler(axes, memory):
    """The sampler records the choices of a forward pass with its weights. With them, the
    log-probabilities of the trainer are at least 10 times closer to those of the sampler.
    """
    step, rng = step_of(axes, memory, MANY), np.random.default_rng(0)
    params = params_of(step)

    def with_noise(path, x):
        noise = 0.01 * jnp.std(x) * rng.standard_normal(x.shape, np.float32)
        return jax.device_put(x + noise, x.sharding) if path[-1].key == "router" else x

    noisy = jax.tree.map_with_path(with_noise, params)
    prompts = [rng.integers(0, 61, n, dtype=np.int32) for n in (30, 7, 25, 12)]
    sampler = Generator(step, noisy, ByteTokenizer())
    answers = sampler(prompts, max_tokens=64, sampling=Sampling(seed=1), chunk_tokens=16)
    rows, model = rows_of(prompts, answers), LanguageModel(step, noisy, ByteTokenizer())
    for prompt, answer in zip(prompts, answers):
        tokens = np.append(prompt, answer.tokens)[None, :-1]
        positions = np.zeros((1, 1), int)
        scores = model.scores(tokens, positions, positions, records_experts=True)
        assert answer.experts.dtype == np.uint8
        np.testing.assert_array_equal(scores.experts[0], answer.experts)
    run = jax.jit(step.objective.log_probs)

    def gap(rows):
        log_probs = run(params, jax.tree.map(lambda x: x[0], make_batch(step, rows)))
        differences = []
        for row, values in zip(rows, np.asarray(log_probs)):
            in_order = values[natural_order(step.sequence_order.of(row))]
            differences.append((in_order - row["sampled"])[row["loss_weights"] > 0])
        return np.abs(np.concatenate(differences)).mean()

    without = [{**row, "experts": np.full_like(row["experts"], 255)} for row in rows]
    assert gap(without) >= 10 * gap(rows) > 0
