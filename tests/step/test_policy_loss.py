"""Losses of post-training through the whole step: shared prefixes against separate rows, and
formulas of the papers.

tests/hf/test_trl_losses.py compares the losses with those of TRL.
"""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.config.schema import PosttrainConfig
from jaxlc.core.errors import UserError
from jaxlc.data.sequences.loader import array_dtypes
from jaxlc.posttrain.losses import PolicySums, denominator, means, over_microbatches, policy_sums
from jaxlc.posttrain.records import CHOSEN, EXPERTS, REJECTED, Trace
from jaxlc.posttrain.trees import PackedTraces, labeled_steps, trees_of
from jaxlc.step.batch import Batch, at_loss_tokens, loss_rows
from jaxlc.step.loss import LossSpec, sums_and_losses
from tests.step.synthetic import (
    HYBRID,
    LATENT,
    gradients_and_loss,
    make_batch,
    put_params,
    small_config,
    small_step,
    without_padding,
)
from tests.tolerances import (
    FLOAT32_GRADIENTS,
    FLOAT32_LOSS,
    FLOAT32_PARITY,
    max_relative_error,
    relative_norm_error,
)

GROUPS = {  # number of prompt tokens -> numbers of answer tokens
    "policy": {30: (9, 1, 14), 5: (7, 3), 11: (6,)},
    "dpo": {30: (9, 1), 5: (7, 3)},
}


def traces(loss: str) -> list[list[Trace]]:
    """Groups of traces with random tokens, advantages and log-probabilities."""
    rng, sampler, groups = np.random.default_rng(0), np.random.default_rng(1), []
    for num_prompt, answers in GROUPS["dpo" if loss == "dpo" else "policy"].items():
        prompt = rng.integers(1, 61, num_prompt)
        group = []
        for number, num_answer in enumerate(answers):
            tokens = np.concatenate([prompt, rng.integers(1, 61, num_answer)]).astype(np.int32)
            in_loss = np.arange(len(tokens)) >= num_prompt
            names = dict(old_log_probs=rng, reference_log_probs=rng, sampled_log_probs=sampler)
            group.append(
                Trace(
                    where="test",
                    tokens=tokens,
                    in_loss=in_loss,
                    prompt=prompt.tobytes(),
                    advantage=(CHOSEN, REJECTED)[number] if loss == "dpo" else float(rng.normal()),
                    recorded={
                        name: (in_loss * -source.uniform(3, 5, len(tokens))).astype(np.float32)
                        for name, source in names.items()
                    }
                    | teacher_of(tokens, in_loss),
                )
            )
        groups.append(group)
    return groups


def teacher_of(tokens: np.ndarray, in_loss: np.ndarray) -> dict[str, np.ndarray]:
    """Two candidates for each token in the loss, a function of the tokens before it."""
    candidates = np.full((len(tokens), 2), -1, np.int32)
    log_probs = np.zeros((len(tokens), 2), np.float32)
    for i in np.flatnonzero(in_loss).tolist():
        rng = np.random.default_rng(tokens[:i].tolist())
        candidates[i] = rng.choice(61, 2, replace=False)
        log_probs[i] = np.log(rng.dirichlet([2, 1, 1])[:2])
    return dict(teacher_tokens=candidates, teacher_log_probs=log_probs)


CHOICES = np.arange(8, dtype=np.uint8)[None]  # of a layer with 8 experts


def branching(loss: str = "", num_groups=2) -> list[list[Trace]]:
    """Groups of traces that branch at several depths, also where tokens are in the loss, with
    recorded values of their own.
    """
    rng, groups = np.random.default_rng(4), []
    for number in range(num_groups):
        paths = [rng.integers(1, 61, 5 + number)]
        for start, cut, length in [(0, 5, 8), (0, 5, 3), (1, 9, 4), (1, 12, 1), (3, 11, 6), (3, 13, 2)]:  # fmt: skip
            paths.append(np.append(paths[start][:cut], rng.integers(1, 61, length)))
        paths = [paths[i] for i in ((3, 5) if loss == "dpo" else (4, 1, 2, 3, 3, 5, 6))]
        group = []
        for index, tokens in enumerate(paths):
            in_loss = (np.arange(len(tokens)) >= 4) & (np.arange(len(tokens)) % 5 > index % 2)
            in_loss[-1] = True
            values = rng.uniform(-4, -2, (3, len(tokens))) * in_loss
            names = ("old_log_probs", "reference_log_probs", "sampled_log_probs")
            advantage = (CHOSEN, REJECTED)[index] if loss == "dpo" else float(rng.normal())
            histories = [tokens[: i + 1].tolist() for i in range(len(tokens))]
            experts = [np.random.default_rng(x).permuted(CHOICES, axis=1)[:, :2] for x in histories]
            group.append(
                Trace(
                    where="test",
                    tokens=tokens.astype(np.int32),
                    in_loss=in_loss,
                    prompt=b"",
                    advantage=advantage,
                    is_truncated=index == 2,
                    recorded={
                        **dict(zip(names, values.astype(np.float32))),
                        EXPERTS: np.array(experts),
                        **teacher_of(tokens, in_loss),
                    },
                )
            )
        groups.append(group)
    return groups


# queries are scaled by their position within a row
QUERY_SCALE = dict(rope_scaling="yarn", rope_scaling_factor=4.0, rope_scaling_original_tokens=8)
QUERY_SCALE |= dict(rope_scaling_query_beta=0.5)
KINDS = {
    "": dict(model=QUERY_SCALE),
    "sliding": dict(model=dict(layer_kinds=("sliding", "full"), window=6, attention_sinks=True)),
    "lora": dict(lora=dict(rank=2)),
    "recurrent": dict(model=HYBRID | QUERY_SCALE),
    "latent": dict(model=LATENT),
    "latent tiles": dict(model=LATENT, memory=dict(tile_tokens=12)),
    "tiles": dict(model=QUERY_SCALE, memory=dict(tile_tokens=12)),
    "replay": dict(
        model=dict(num_experts=8, experts_per_token=2, expert_ffn_dim=24, num_layers=1),
        posttrain=dict(replay_routing=True),
    ),
    "experts": dict(
        model=dict(num_experts=8, experts_per_token=2, expert_ffn_dim=24, shared_ffn_dim=16),
        memory=dict(tile_tokens=12),
    ),
}
KINDS["teacher"] = dict(model=dict(num_layers=1), posttrain=dict(teacher_top_k=2))
KINDS["teacher tiles"] = KINDS["teacher"] | dict(memory=dict(tile_tokens=12))
KINDS |= {f"{kind} tiles": KINDS["tiles"] | KINDS[kind] for kind in ("sliding", "recurrent")}
WITHOUT_TILES = {kind: kind.removesuffix("tiles").strip() for kind in KINDS if "tiles" in kind}
LIMITS = dict(token=(0.5, 1.5), sequence=(0.1, 10.0), geometric=(0.8, 1.2))
for mode in (
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask",
):  # fmt: skip
    low, high = LIMITS[mode.split("_")[0]]
    KINDS[mode] = KINDS[""] | dict(posttrain=dict(importance_weights=True, weight_mode=mode))
    KINDS[mode]["posttrain"] |= dict(weight_min=low, weight_max=high, off_policy_mask_threshold=0.1)


DEEP_SEQ_LEN = 72  # the trees of `branching` fit, and have more rows of the loss: 88


def config_with(loss: str, *, shares=True, seq_len=192, **sections):
    """One sequence of 192 tokens, in which all trees fit, also as separate rows."""
    policy = (
        dict(old_log_probs="record", kl=0.1, clip_low=0.1, clip_high=0.4)
        if loss not in ("", "dpo")
        else {}
    )
    sections["attention"] = sections.get("attention", {}) | dict(shared_prefixes=shares)
    sizes = dict(data=dict(seq_len=seq_len), train=dict(global_batch_size=1, eval_sequences=1))
    if loss == "cispo":
        del policy["clip_low"]
    policy |= sections.pop("posttrain", {})
    return small_config(posttrain=dict(loss=loss) | policy, **sizes, **sections)


def sequence(config, groups) -> dict[str, np.ndarray]:
    levels, seq_len = config.attention.shared_prefixes, config.data.seq_len
    trees = [tree for group in groups for tree in trees_of(group, seq_len, levels=levels)]
    assert bool(levels) == any(len(tree.traces) > 1 for tree in trees)
    packed = PackedTraces(trees, seq_len, array_dtypes(config))
    assert packed.num_sequences == 1
    return packed[0]


def results(config, loss: str, params=None, groups=None):
    """(parameters, gradients of the sum of the loss, the loss)."""
    step = small_step(config)
    params = step.init().params if params is None else put_params(step, params)
    gradients, sums = jax.jit(gradients_and_loss(step))(
        params, make_batch(step, [sequence(config, groups or traces(loss))])
    )
    return params, gradients, sums.loss if loss else sums


def separate_rows(loss: str, kinds: str = ""):
    """Results on one device, without tiles. For dpo, the answers of a pair continue a prefix that
    only they have.
    """
    return _separate_rows(loss, WITHOUT_TILES.get(kinds, kinds))


@functools.cache
def _separate_rows(loss: str, kinds: str):
    sections = {name: values for name, values in KINDS[kinds].items() if name != "memory"}
    return results(config_with(loss, shares=loss == "dpo", **sections), loss)


def magnitude(config, loss):
    """The sum of the magnitudes of the terms of a loss, for ratios of 1: advantages of both signs
    cancel.
    """
    weights = dict(grpo="answer_weights", dapo="loss_weights", cispo="loss_weights").get(
        config.posttrain.loss
    )
    if weights is None:
        return float(loss)
    row = sequence(config, traces(config.posttrain.loss))
    return (row[weights] * np.abs(row["advantages"])).sum()


@pytest.mark.parametrize(
    "loss, kinds, mesh, attention",
    [
        ("dapo", "sliding", dict(context=4), dict(strategy="ring")),
        ("grpo", "sequence_mask", dict(context=8), {}),
        # The heavy latent_oracle.py and recurrent_oracle.py have other kinds and tensor ranks, and
        # another test here tiles.
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("grpo", "", dict(context=1), {}),
                ("grpo", "", dict(context=8), {}),
                ("grpo", "sequence_mask", dict(context=4), {}),
                ("grpo", "tiles", dict(context=2), {}),
                ("grpo", "recurrent", dict(context=4), {}),
                ("grpo", "latent", dict(context=2, tensor=2), {}),
                ("", "", dict(context=4, tensor=2), {}),
                ("", "teacher", dict(context=4, tensor=2), {}),
                ("", "teacher tiles", dict(context=2), {}),
                ("dapo", "lora", dict(context=4), dict(strategy="all_gather")),
                ("dpo", "tiles", dict(context=4), dict(strategy="hybrid", ulysses_degree=2)),
                ("", "tiles", dict(context=2), dict(strategy="ulysses")),
                ("dpo", "recurrent", dict(context=2, tensor=2), dict(strategy="ulysses")),
                ("dapo", "sliding tiles", dict(context=2, tensor=2), {}),
                ("dapo", "sliding", dict(context=2, tensor=2), dict(strategy="ulysses")),
                ("grpo", "", dict(context=4), dict(document_sharding=False)),
                ("dpo", "", dict(context=4), dict(strategy="hybrid", ulysses_degree=2)),
                ("dapo", "geometric_mask", dict(context=4), {}),
                ("cispo", "sequence_truncate", dict(context=2), {}),
                ("dapo", "token_mask", dict(context=2), {}),
            )
        ),
    ],
    ids=str,
)
def test_shared_prefixes_equal_separate_rows(loss, kinds, mesh, attention):
    params, gradients, expected = separate_rows(loss, kinds)
    config = config_with(loss, **KINDS[kinds], mesh=mesh, attention=attention)
    _, got, got_loss = results(config, loss, params)
    np.testing.assert_allclose(
        got_loss, expected, rtol=0, atol=FLOAT32_LOSS * magnitude(config, expected)
    )
    got = jax.tree.map(without_padding, got, gradients)
    errors = jax.tree.map(max_relative_error, got, gradients)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors
    error = relative_norm_error(got, gradients)
    print(f"gradients, norm-wise: {error:.1e}")  # shown by -rP
    assert error <= FLOAT32_GRADIENTS


@functools.cache
def branching_rows(loss: str, kinds: str):
    """Results of separate rows on one device."""
    return results(config_with(loss, shares=0, **KINDS[kinds]), loss, groups=branching())


@pytest.mark.parametrize(
    "loss, kinds, mesh",
    [
        ("dapo", "replay", dict(context=2)),
        pytest.param("", "teacher", dict(context=2), marks=pytest.mark.full),
        pytest.param("", "", dict(context=2, tensor=2), marks=pytest.mark.full),
        pytest.param("dapo", "", dict(context=1), marks=pytest.mark.full),
        pytest.param("dapo", "", dict(context=4), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_deep_trees_equal_separate_rows(loss, kinds, mesh):
    """With tokens in the loss of several traces, whose advantages have both signs."""
    params, gradients, expected = branching_rows(loss, kinds)
    config = config_with(loss, shares=3, seq_len=DEEP_SEQ_LEN, **KINDS[kinds], mesh=mesh)
    _, got, got_loss = results(config, loss, params, branching())
    rows = [abs(trace.advantage) * trace.in_loss.sum() for trace in sum(branching(), [])]
    np.testing.assert_allclose(got_loss, expected, rtol=0, atol=FLOAT32_LOSS * sum(rows))
    errors = jax.tree.map(lambda a, b: max_relative_error(without_padding(a, b), b), got, gradients)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


def histories_of(row: dict[str, np.ndarray], levels: int) -> list[tuple[int, ...]]:
    """The tokens up to the target of each token of a sequence; () of padding."""
    histories, paths = [], {0: []}
    for place, segment in enumerate(row["segment_ids"]):
        ancestors = row["prefix_ids"][place].tolist() if levels else []
        parent = max([x for x in ancestors if x], default=0)
        paths.setdefault(segment, list(paths[parent])).append(int(row["tokens"][place]))
        histories.append((*paths[segment], int(row["targets"][place])) if segment else ())
    return histories


def test_teacher_of_deep_trees_is_that_of_each_trace():
    """By the tokens up to each target, with the number of traces that have it in the loss."""
    config = config_with("", shares=3, seq_len=DEEP_SEQ_LEN, **KINDS["teacher"])
    row, names = sequence(config, branching()), ("teacher_tokens", "teacher_log_probs")
    weights = np.zeros(DEEP_SEQ_LEN)
    np.add.at(weights, row["loss_tokens"].ravel(), row["loss_weights"].ravel())
    got, expected = {}, {}
    for place, history in enumerate(histories_of(row, 3)):
        if weights[place]:
            values = tuple(row[name][place].tobytes() for name in names)
            got[history, values] = got.get((history, values), 0) + weights[place]
    for trace in sum(branching(), []):
        for i in np.flatnonzero(trace.in_loss).tolist():
            values = tuple(trace.recorded[name][i].tobytes() for name in names)
            key = tuple(trace.tokens[: i + 1].tolist()), values
            expected[key] = expected.get(key, 0) + 1
    assert got == expected and max(got.values()) > 2


def test_experts_of_shared_prefixes_equal_separate_rows_and_count_prefixes_once():
    """In tiles, on two ranks."""
    params, gradients, expected = separate_rows("", "experts")
    step = small_step(config_with("", **KINDS["experts"], mesh=dict(context=2)))
    batch = make_batch(step, [sequence(step.config, traces(""))])
    loss, got, _, experts = jax.jit(step.objective.loss_and_grads)(put_params(step, params), batch)
    np.testing.assert_allclose(loss, expected, rtol=FLOAT32_LOSS)
    errors = jax.tree.map(lambda a, b: max_relative_error(without_padding(a, b), b), got, gradients)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors
    # Inputs: an answer begins with the last token of its prompt, and its own last token is only a
    # target.
    num_tokens = sum(prompt - 1 + sum(answers) for prompt, answers in GROUPS["policy"].items())
    np.testing.assert_array_equal(experts.counts_LE.sum(1), [2 * num_tokens] * 2)


@pytest.mark.heavy
@pytest.mark.full
def test_shared_prefixes_in_float64_equal_separate_rows():
    """To 1e-13: in float32 they differ by the order of sums only.

    The oracles of test_parity.py have trees of latent and recurrent layers in float64, and test_shared_prefix.py
    has them in sliding windows.
    """
    output = subprocess.run(
        [sys.executable, "-m", "tests.step.float64_parity"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    errors = [float(word) for line in output.splitlines() for word in line.split()[-2:]]
    assert len(errors) == 2 * 23 and max(errors) <= 1e-13, output


def test_base_as_reference_equals_recorded_log_probs():
    """At the start, the adapters of LoRA are 0: the base is the policy, so dpo has the loss log 2
    per pair. Answers share tokens in the loss.
    """
    config = config_with("dpo", shares=2, **KINDS["lora"])
    config = dataclasses.replace(
        config, posttrain=dataclasses.replace(config.posttrain, reference="base")
    )
    groups = branching("dpo")
    _, gradients, loss = results(config, "dpo", groups=groups)
    np.testing.assert_allclose(loss, len(groups) * np.log(2), rtol=1e-6)
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(gradients))


MASK = dict(loss="dapo", old_log_probs="record", importance_weights=True)
MASK |= dict(weight_mode="geometric_mask", weight_min=0.9, weight_max=1.1)


def test_geometric_mask_equals_its_formula():
    """In float64. Two answers in one sequence, one that is masked, and padding; the mean over the tokens of an answer
    in the loss is the logarithm of its weight, which is 0 outside of the limits.
    """
    rng, segments = (
        np.random.default_rng(0),
        np.repeat([1, 2, 1, 2, 0, 3], [3, 4, 2, 4, 1, 2])[None],
    )
    has_loss = (segments > 0) & (segments < 3) & (np.arange(16) % 4 > 0)
    counts = np.array([(has_loss & (segments == number)).sum() for number in range(4)])
    new, old, sampled = (rng.normal(-2, 0.3, segments.shape) for _ in range(3))
    first = has_loss & (segments == 1)
    sampled += np.where(first, (old - sampled).mean(where=first) - 0.05, 0)
    advantages = np.array([0.0, -0.7, 1.3, 1.0])[segments]
    answer_weights = np.where(segments == 3, 0.5, has_loss / np.maximum(counts[segments], 1))
    arrays = dict(
        advantages=advantages, answer_weights=answer_weights, old_log_probs=old,
        sampled_log_probs=sampled,
    )  # fmt: skip
    with jax.enable_x64(True):
        batch = Batch(None, None, has_loss * 1.0, None, segments, **arrays)
        sums = policy_sums(
            jnp.asarray(new), jax.tree.map(jnp.asarray, batch), PosttrainConfig(**MASK)
        )
        sums = jax.tree.map(np.asarray, means(sums, batch, PosttrainConfig(**MASK)))
    weights = np.zeros(segments.shape)
    for number in (1, 2):
        tokens = has_loss & (segments == number)
        weight = np.exp((old - sampled).mean(where=tokens))
        weights[tokens] = weight if 0.9 <= weight <= 1.1 else 0
    assert (weights[segments == 1] > 0).any() and not weights[segments == 2].any()
    ratios = np.exp(new - old)
    gains = np.minimum(ratios * advantages, np.clip(ratios, 0.8, 1.28) * advantages)
    difference = np.abs(sampled - old)
    expected = dict(
        loss=-(weights * gains).mean(where=has_loss), weight=weights.mean(where=has_loss),
        weight_cut=counts[2] / counts.sum(), weight_cut_answers=0.5,
        sampler_difference=difference.mean(where=has_loss), sampler_difference_max=difference[has_loss].max(),
    )  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(sums, name), value, rtol=1e-12, err_msg=name)


def labeled_results(params=None, *, accumulation: int, shares: bool, **mesh):
    """Results of kto on two sequences, against the model without its adapters, which are not 0."""
    train = dict(global_batch_size=2, eval_sequences=2, gradient_accumulation_steps=accumulation)
    config = small_config(
        posttrain=dict(loss="kto", reference="base", undesirable_weight=0.7, beta=0.3),
        attention=dict(shared_prefixes=shares),
        lora=dict(rank=2),
        data=dict(seq_len=192),
        model=dict(num_layers=1),
        train=train,
        mesh=mesh,
    )
    labeled = [
        dataclasses.replace(trace, advantage=(CHOSEN, REJECTED)[number % 2], recorded={})
        for number, trace in enumerate(sum(traces("policy"), []))
    ]
    seq_len = config.data.seq_len
    sequences = labeled_steps(labeled, seq_len, 2, levels=int(shares))
    flat = [tree for trees in sequences for tree in trees]
    sequences = [flat[::2], flat[1::2]] if shares else sequences
    packed = PackedTraces(flat, seq_len, array_dtypes(config), sequences=sequences)
    assert packed.num_sequences == 2 and len(packed.traces) == 6
    step = small_step(config)
    if params is None:
        noise = np.random.default_rng(7)
        params = jax.tree.map(
            lambda x: x + noise.normal(0, 0.1, x.shape).astype(np.float32), step.init().params
        )
    params = put_params(step, params)
    batch = make_batch(step, [packed[0], packed[1]])
    gradients, sums = jax.jit(gradients_and_loss(step))(params, batch)
    return params, gradients, means(sums, batch, config.posttrain)


@pytest.mark.parametrize("shares", [False, pytest.param(True, marks=pytest.mark.full)])
def test_kto_has_one_divergence_of_the_step_on_every_mesh(shares):
    """Mismatched answers of both microbatches; the gradient leaves them out."""
    params, gradients, expected = labeled_results(accumulation=1, shares=False)
    assert expected.kl > 0.1 and 0 < expected.accuracy < 1
    _, got, sums = labeled_results(params, accumulation=2, shares=shares, context=2)
    for name in ("loss", "kl", "margin", "accuracy"):
        np.testing.assert_allclose(getattr(sums, name), getattr(expected, name), rtol=1e-5)
    errors = jax.tree.map(lambda a, b: max_relative_error(without_padding(a, b), b), got, gradients)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired", "simpo"])
def test_preference_loss_equals_its_formula(loss):
    """In float64, of two answers and one that is mismatched. TRL has the same formulas."""
    rng, segments = np.random.default_rng(0), np.repeat([1, 2, 3, 0], [4, 6, 5, 3])
    new, reference = rng.normal(-2, 0.3, (2, len(segments)))
    new += 0.3 * (segments == 3)
    has_loss = np.isin(segments, (1, 2))
    settings = PosttrainConfig(loss=loss, beta=0.4, undesirable_weight=0.7)
    is_answer = has_loss if loss == "simpo" else segments > 0
    weights = is_answer / np.maximum(np.bincount(segments)[segments], 1)
    sides = np.array([0.0, 1, -1, 0])[segments]
    arrays = dict(advantages=sides, answer_weights=weights, reference_log_probs=reference)
    arrays |= dict(loss_weights=has_loss * 1.0, segment_ids=segments, tokens=None, targets=None)
    arrays |= dict(prefix_ids=is_answer[:, None].astype(np.int32), positions=None)
    with jax.enable_x64(True):
        batch = Batch(
            **{name: x if x is None else jnp.asarray(x[None]) for name, x in arrays.items()}
        )
        sums = policy_sums(jnp.asarray(new[None]), batch, settings)
        got = means(sums, batch, settings)
    ratios = [(new - reference).sum(where=segments == number) for number in (1, 2, 3)]

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    kl = max(ratios[2], 0) if loss == "kto" else 0
    if loss == "simpo":
        chosen, rejected = (new.mean(where=segments == number) for number in (1, 2))
        margin = 0.4 * (chosen - rejected)
        expected = dict(loss=-np.log(sigmoid(margin - 0.5)), margin=margin, accuracy=1.0)
        assert 0 < margin < 0.5
    else:
        assert ratios[2] > 0
        gains = 0.4 * (ratios[0] - kl), 0.4 * (kl - ratios[1])
        expected = dict(
            loss=np.mean([sigmoid(-gains[0]), 0.7 * sigmoid(-gains[1])]),
            margin=0.4 * (ratios[0] - ratios[1]) / 2,
            accuracy=np.mean(np.array(gains) > 0),
            kl=kl,
        )
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(got, name), value, rtol=1e-12, err_msg=name)


def test_reverse_kl_has_the_gradient_of_the_divergence_in_expectation():
    """In float64: each next token is sampled with its probability."""
    rng, settings = np.random.default_rng(0), PosttrainConfig(loss="reverse_kl")
    with jax.enable_x64(True):
        logits, teacher = (jnp.asarray(x) for x in rng.normal(size=(2, 5)))
        teacher, probs = jax.nn.log_softmax(teacher), jax.nn.softmax(logits)[:, None]
        arrays = dict(advantages=probs, answer_weights=probs, reference_log_probs=teacher[:, None])
        ids = jnp.ones((5, 1), jnp.int32)
        batch = Batch(None, None, probs, None, ids, **arrays)

        def loss(logits):
            sums = policy_sums(jax.nn.log_softmax(logits)[:, None], batch, settings)
            return sums.loss, means(sums, batch, settings)

        def divergence(logits):
            return (jax.nn.softmax(logits) * (jax.nn.log_softmax(logits) - teacher)).sum()

        got, metrics = jax.grad(loss, has_aux=True)(logits)
        expected, gradient = jax.value_and_grad(divergence)(logits)
    np.testing.assert_allclose(got, gradient, rtol=1e-12)
    np.testing.assert_allclose(metrics.kl, expected, rtol=1e-12)


def leaf_results(settings: PosttrainConfig, levels: int, shared_tokens="leaf"):
    """Means of a step, and the gradients of its loss by the tokens up to each target, for
    log-probabilities that depend on these tokens.
    """
    seq_len = DEEP_SEQ_LEN if levels > 1 else 256
    groups = branching(settings.loss)
    if settings.mask_truncated:
        groups = [
            [dataclasses.replace(x, has_loss=not x.is_truncated) for x in group] for group in groups
        ]
    trees = [tree for group in groups for tree in trees_of(group, seq_len, levels=levels)]
    config = config_with("dapo", shares=levels)
    values = ("old_log_probs", "reference_log_probs", "sampled_log_probs")
    dtypes = array_dtypes(config)
    dtypes |= dict.fromkeys(values, dtypes["loss_weights"])
    packed = PackedTraces(trees, seq_len, dtypes, shared_tokens=shared_tokens)
    assert packed.num_sequences == 1
    row = packed[0]
    histories = histories_of(row, levels)
    log_probs = [np.random.default_rng(x).uniform(-4, -2) for x in histories]
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x[None]) for name, x in row.items()}
        batch = Batch(
            **{name: x.astype(float) if x.dtype == "f4" else x for name, x in arrays.items()}
        )

        def loss(log_probs_BT):
            sums = policy_sums(at_loss_tokens(log_probs_BT, batch), loss_rows(batch), settings)
            return sums.loss / denominator(batch, settings), sums

        gradients, sums = jax.jit(jax.grad(loss, has_aux=True))(jnp.array(log_probs)[None])
        means_of_step = jax.tree.map(float, means(sums, batch, settings))
    by_history: dict[tuple, float] = {}
    for history, gradient in zip(histories, gradients[0].tolist()):
        by_history[history] = by_history.get(history, 0.0) + gradient
    return means_of_step, {x: y for x, y in by_history.items() if y}, packed.num_tokens


RECORDED = dict(old_log_probs="record", clip_low=0.1, clip_high=0.2)
WEIGHTED = RECORDED | dict(importance_weights=True, weight_min=0.5, weight_max=1.5, kl=0.1)
WEIGHTED |= dict(off_policy_mask_threshold=0.1)
BY_LEAF = [
    dict(loss="grpo", ratio="sequence", **RECORDED),
    dict(loss="dr_grpo", max_answer_tokens=20, delta=1.3, **RECORDED),
    dict(loss="dapo", mask_truncated=True, **WEIGHTED),
    dict(loss="grpo", weight_mode="sequence_mask", **WEIGHTED | dict(weight_max=3.0)),
    dict(loss="cispo", weight_mode="geometric_mask", **WEIGHTED),
    dict(loss="dpo", label_smoothing=0.1),
]


@pytest.mark.parametrize("settings", BY_LEAF, ids=str)
def test_losses_by_leaf_equal_separate_rows(settings):
    """In float64: values, metrics and gradients. Shared tokens have advantages of both signs."""
    settings = PosttrainConfig(**settings)
    expected, gradients, num_tokens = leaf_results(settings, int(settings.loss == "dpo"))
    got, got_gradients, fewer = leaf_results(settings, 2 if settings.ratio == "sequence" else 3)
    assert fewer < num_tokens and got_gradients.keys() == gradients.keys()
    for name, value in expected._asdict().items():
        np.testing.assert_allclose(getattr(got, name) or 0, value or 0, rtol=1e-11, err_msg=name)
    scale = max(map(abs, gradients.values()))
    for history, gradient in gradients.items():
        np.testing.assert_allclose(got_gradients[history], gradient, atol=1e-11 * scale)


def test_shared_tokens_may_count_once():
    """Then the loss is the mean over distinct tokens of the mean over their leaves."""
    settings = PosttrainConfig(loss="dapo", **RECORDED)
    got, *_ = leaf_results(settings, 3, "node")
    terms: dict[tuple, list[float]] = {}
    for trace in sum(branching(), []):
        for i in np.flatnonzero(trace.in_loss).tolist():
            history = tuple(trace.tokens[: i + 1].tolist())
            new, old = (
                np.random.default_rng(history).uniform(-4, -2),
                trace.recorded["old_log_probs"][i],
            )
            ratio, advantage = np.exp(new - old), np.float32(trace.advantage)
            gain = min(ratio * advantage, np.clip(ratio, 0.9, 1.2) * advantage)
            terms.setdefault(history, []).append(-gain)
    assert max(map(len, terms.values())) > 2
    np.testing.assert_allclose(got.loss, np.mean([np.mean(x) for x in terms.values()]), rtol=1e-6)


def test_microbatches_have_the_metrics_of_one_batch():
    """Sums are added, and the largest difference is a maximum."""
    parts = PolicySums(
        *np.array([[3.0, 5.0], [1.0, 2.0]]), sampler_difference_max=np.array([2.0, 1])
    )
    total = over_microbatches(parts)
    assert (total.loss, total.ratio, total.sampler_difference_max) == (8, 3, 2)


@pytest.mark.parametrize(
    "settings",
    [
        dict(loss="dpo", beta=0.5, label_smoothing=0.1),
        dict(
            loss="grpo",
            ratio="sequence",
            kl=0.1,
            old_log_probs="record",
            clip_low=0.9,
            clip_high=9.0,
            temperature=0.7,
        ),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_loss(settings):
    """A central difference of the loss along its gradient."""
    config = config_with(settings["loss"])
    config = dataclasses.replace(config, posttrain=PosttrainConfig(**settings))
    step = small_step(config)
    params, batch = (
        step.init().params,
        make_batch(step, [sequence(config, traces(settings["loss"]))]),
    )
    function = jax.jit(gradients_and_loss(step))
    gradients, _ = function(params, batch)
    squares = sum(float((x**2).sum()) for x in jax.tree.leaves(gradients))
    size = 0.005 / squares**0.5

    def loss_at(distance: float) -> float:
        return float(
            function(jax.tree.map(lambda x, g: x + distance * g, params, gradients), batch)[1].loss
        )

    np.testing.assert_allclose((loss_at(size) - loss_at(-size)) / (2 * size), squares, rtol=0.02)


@functools.cache
def ratios_of_one():
    """(config, parameters, batch, a function of both) of dapo without a clip: all ratios are 1, and
    kl is 0.
    """
    config = config_with("dapo")
    config = dataclasses.replace(config, posttrain=PosttrainConfig(loss="dapo"))
    step = small_step(config)
    batch = make_batch(step, [sequence(config, traces("dapo"))])
    return config, step.init().params, batch, jax.jit(gradients_and_loss(step))


def test_custom_loss_replaces_the_formula():
    """With ratios of 1, the gradient of dapo is that of the advantages times the log-probabilities."""
    config, params, batch, dapo = ratios_of_one()
    expected, sums_of_dapo = dapo(params, batch)

    def policy_loss(log_probs_BT, batch):
        return -(batch.loss_weights * batch.advantages * log_probs_BT).sum()

    step = small_step(config, policy_loss=policy_loss)
    gradients, sums = jax.jit(gradients_and_loss(step))(params, batch)
    errors = jax.tree.map(max_relative_error, gradients, expected)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY and sums.ratio is None and sums.loss != 0
    assert 0 < sums.entropy < np.log(61) * batch.loss_weights.sum()
    np.testing.assert_allclose(sums.entropy, sums_of_dapo.entropy, rtol=1e-6)
    with pytest.raises(UserError, match="policy_loss has no effect without config.posttrain.loss"):
        small_step(
            dataclasses.replace(config, posttrain=PosttrainConfig()), policy_loss=policy_loss
        )
    with pytest.raises(UserError, match="expected the sum of the losses"):
        step = small_step(config, policy_loss=lambda log_probs_BT, batch: log_probs_BT)
        jax.eval_shape(gradients_and_loss(step), params, batch)


def test_entropy_equals_that_of_the_logits():
    """On two tensor ranks, whose columns have padding, in several chunks."""
    mesh, rng = (
        small_step(small_config(mesh=dict(context=2, tensor=2))).mesh,
        np.random.default_rng(0),
    )
    sizes = dict(vocab_size=61, chunk_tokens=8, z_loss=0.0, norm_epsilon=1e-5)
    spec = LossSpec(mesh=mesh, **sizes, temperature=0.7, with_entropy=True)
    x_BTD, head_DV = rng.normal(size=(2, 64, 16)), rng.normal(size=(16, 64))
    weights_BT = rng.integers(0, 2, (2, 64))
    targets_BT = np.zeros((2, 64), np.int32)
    sums, _ = jax.jit(functools.partial(sums_and_losses, scale_D=None, spec=spec))(
        x_BTD.astype(np.float32),
        head_DV=head_DV.astype(np.float32),
        targets_BT=targets_BT,
        weights_BT=weights_BT.astype(np.float32),
    )
    logits = (x_BTD @ head_DV)[..., :61] / 0.7
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropies_BT = -(np.exp(log_probs) * log_probs).sum(-1)
    np.testing.assert_allclose(sums.entropy, (weights_BT * entropies_BT).sum(), rtol=1e-5)


def test_zero_advantages_have_zero_gradients():
    _, params, batch, dapo = ratios_of_one()
    gradients, _ = dapo(params, batch._replace(advantages=0 * batch.advantages))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(gradients))
