"""Compares latent attention with an oracle that is written from the paper, in float64.

    python -m tests.step.latent_oracle [--all]

Raises unless cached generation equals the oracle. Prints for each other case the largest relative
errors of the losses of all tokens, and of the gradient of a parameter.

The oracle computes each document as a sequence of its own, token after token: DeepSeek-V2
(arXiv:2405.04434), equations 37 to 47, with the norms of latents of section 3.1.2 and the scale of
logits of section 3.1.4. Frequencies of yarn: arXiv:2309.00071, section 3.2.

It runs in a process of its own: before the package is imported, float32 is replaced by float64. So
the errors that are left are those of the algorithm, not of rounding.
"""

import functools
import math
import sys

import jax
import jax.numpy as jnp

import tests.conftest  # noqa: F401  simulated devices

jax.config.update("jax_enable_x64", True)
jnp.float32 = jnp.float64

import numpy as np  # noqa: E402

from tests.generation import test_generator  # noqa: E402
from tests.step.synthetic import (  # noqa: E402
    LATENT,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
    without_padding,
)
from tests.step.test_policy_loss import config_with, sequence, traces  # noqa: E402
from tests.tolerances import max_relative_error  # noqa: E402
from tests.trees import arrays_of, random_documents  # noqa: E402

OWN, ROTATED = 4, 8  # widths of the two parts of a key
FACTOR, ORIGINAL, THETA, MSCALE = 4.0, 32, 100.0, 0.707
MODEL = LATENT | dict(
    num_heads=4,
    head_dim=OWN + ROTATED,
    rope_fraction=ROTATED / (OWN + ROTATED),
    rope_theta=THETA,
    rope_scaling="yarn",
    rope_scaling_factor=FACTOR,
    rope_scaling_original_tokens=ORIGINAL,
    rope_scaling_attention_factor=1.0,
    rope_scaling_query_mscale=MSCALE,
)


def frequencies() -> np.ndarray:
    """[P/2]: those with fewer than one turn in the original context are divided by the factor, those
    with more than 32 are not, and others are mixed by their index.
    """

    def index(turns: float) -> float:
        return ROTATED * math.log(ORIGINAL / (2 * math.pi * turns)) / (2 * math.log(THETA))

    low, high = max(math.floor(index(32)), 0), math.ceil(index(1))
    divided = np.clip((np.arange(ROTATED // 2) - low) / (high - low), 0, 1)
    frequency = THETA ** (-2 * np.arange(ROTATED // 2) / ROTATED)
    return frequency * (divided / FACTOR + 1 - divided)


def rotated(x, position):
    """RoPE(x): pairs of neighbors are complex numbers."""
    angle = position * frequencies()
    real, imaginary = x[..., 0::2], x[..., 1::2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    pairs = real * cos - imaginary * sin, real * sin + imaginary * cos
    return jnp.stack(pairs, axis=-1).reshape(x.shape)


def norm(x, scale, epsilon):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def attention(h_TD, w):
    """u_TD of a sequence."""
    scale = (0.1 * MSCALE * math.log(FACTOR) + 1) ** 2 / math.sqrt(OWN + ROTATED)
    rank = w["wkv_up"].shape[0]
    w_uk, w_uv = w["wkv_up"][:, :, :OWN], w["wkv_up"][:, :, OWN:]
    num_tokens, (num_heads, value_dim, _) = len(h_TD), w["wo"].shape

    def token(cache, t):
        keys_TNH, values_TNV = cache
        h = h_TD[t]
        c_q = norm(h @ w["wq_down"], w["q_norm"]["scale"], 1e-6)  # (37)
        q = jnp.einsum("l,lnh->nh", c_q, w["wq_up"])  # (38)
        q = jnp.concatenate([q[:, :OWN], rotated(q[:, OWN:], t)], axis=-1)  # (39), (40)
        c_kv, shared = jnp.split(h @ w["wkv_down"], [rank])  # (41)
        c_kv = norm(c_kv, w["kv_norm"]["scale"], 1e-6)
        own = jnp.einsum("l,lnh->nh", c_kv, w_uk)  # (42)
        shared = jnp.tile(rotated(shared, t), (num_heads, 1))  # (43)
        keys_TNH = keys_TNH.at[t].set(jnp.concatenate([own, shared], axis=-1))  # (44)
        values_TNV = values_TNV.at[t].set(jnp.einsum("l,lnv->nv", c_kv, w_uv))  # (45)
        logits = scale * jnp.einsum("nh,jnh->nj", q, keys_TNH)
        logits = jnp.where(jnp.arange(num_tokens) <= t, logits, -jnp.inf)
        o = jnp.einsum("nj,jnv->nv", jax.nn.softmax(logits), values_TNV)  # (46)
        return (keys_TNH, values_TNV), jnp.einsum("nv,nvd->d", o, w["wo"])  # (47)

    none = (
        jnp.zeros((num_tokens, num_heads, OWN + ROTATED)),
        jnp.zeros((num_tokens, num_heads, value_dim)),
    )
    return jax.lax.scan(token, none, jnp.arange(num_tokens))[1]


MIXERS = {"latent": attention}  # of kinds of layers


def layers_of(params):
    """(the mixer, the parameters) of each layer."""
    kinds = MODEL["layer_kinds"]
    stacks = params["layers"] if len(kinds) > 1 else {kinds[0]: params["layers"]}
    for layer in range(MODEL.get("num_layers", 2)):
        index, kind = divmod(layer, len(kinds))
        yield (
            MIXERS[kinds[kind]],
            jax.tree.map(lambda x, index=index: x[index], stacks[kinds[kind]]),
        )


def logits_of(params, tokens_T):
    """Of a sequence, [T, V]."""
    x_TD = params["embedding"][tokens_T]
    for mixer, w in layers_of(params):
        x_TD += mixer(norm(x_TD, w["attention_norm"]["scale"], 1e-5), w["attention"])
        h_TD, mlp = norm(x_TD, w["mlp_norm"]["scale"], 1e-5), w["mlp"]
        x_TD += (jax.nn.silu(h_TD @ mlp["w_gate"]) * (h_TD @ mlp["w_up"])) @ mlp["w_down"]
    return norm(x_TD, params["final_norm"]["scale"], 1e-5) @ params["head"]


def documents_of(row) -> list[tuple[np.ndarray, np.ndarray]]:
    """Places of the tokens of each document, with the prefixes that it continues, and its own ones."""
    segments, documents = row["segment_ids"], []
    prefixes = row.get("prefix_ids", segments[:, None] * 0)
    for segment in range(1, segments.max() + 1):
        (own,) = np.nonzero(segments == segment)
        path = prefixes[own[0]]
        (before,) = np.nonzero(np.isin(segments, path[path > 0]))
        documents.append((np.concatenate([before, own]), own))
    return documents


def random_vectors(params):
    """Norms and skips that are not 1, and random biases."""
    rng = np.random.default_rng(0)

    def drawn(path, x):
        name = path[-1].key
        if name in ("scale", "skip"):
            return jnp.asarray(rng.uniform(0.5, 1.5, x.shape))
        return x + rng.standard_normal(x.shape) if "bias" in name else x

    return jax.tree.map_with_path(drawn, params)


@functools.cache
def oracle(name: str):
    """(parameters, rows, losses of all tokens [rows, T], gradients of their weighted sum)."""
    config, rows = config_and_rows(name)
    params = random_vectors(small_step(config).init().params)
    documents = [(number, *x) for number, row in enumerate(rows) for x in documents_of(row)]
    places_DT = np.zeros((len(documents), max(len(places) for _, places, _ in documents)), int)
    for document, (_, places, _) in enumerate(documents):
        places_DT[document, : len(places)] = places
    row_D1 = np.array([number for number, _, _ in documents])[:, None]
    tokens, targets, weights = (
        np.stack([row[key].reshape(len(row[key]), -1)[:, 0] for row in rows])
        for key in ("tokens", "targets", "loss_weights")
    )
    is_own_DT = np.zeros(places_DT.shape)
    for document, (_, places, own) in enumerate(documents):
        is_own_DT[document, len(places) - len(own) : len(places)] = 1

    def loss(params):
        logits_DTV = jax.vmap(lambda tokens_T: logits_of(params, tokens_T))(
            tokens[row_D1, places_DT]
        )
        log_probs = jax.nn.log_softmax(logits_DTV)
        losses_DT = -jnp.take_along_axis(log_probs, targets[row_D1, places_DT][..., None], -1)[
            ..., 0
        ]
        return (losses_DT * weights[row_D1, places_DT] * is_own_DT).sum(), losses_DT

    gradients, losses_DT = jax.jit(jax.grad(loss, has_aux=True))(params)
    losses = np.full(tokens.shape, np.nan)  # of padding
    for document, (number, places, own) in enumerate(documents):
        losses[number, own] = losses_DT[document, len(places) - len(own) : len(places)]
    return params, rows, losses, gradients


def config_and_rows(name: str, **sections):
    """Packed documents in four rows, or answers that continue prefixes in one row, or deeper trees."""
    if name == "trees":
        config = config_with("", shares=4, model=MODEL, **sections)
        return config, [tree_row(config.data.seq_len)]
    if name == "prefixes":
        config = config_with("", model=MODEL, **sections)
        return config, [sequence(config, traces(""))]
    return small_config(model=MODEL, **sections), natural_rows()


def tree_row(num_tokens: int) -> dict[str, np.ndarray]:
    """With random tokens, targets and weights. Of the rows of the loss, [tokens, levels], the first of
    each token is in use.
    """
    rng, row = np.random.default_rng(0), arrays_of(random_documents(num_tokens, 4), num_tokens, 4)
    tokens, targets = rng.integers(1, 61, (2, num_tokens), dtype=np.int32)
    weights = rng.integers(0, 3, num_tokens) * (row["segment_ids"] > 0).astype(np.float32)
    row |= dict(tokens=tokens, targets=targets)
    loss = dict(
        loss_tokens=np.arange(num_tokens), loss_segments=row["segment_ids"], loss_weights=weights
    )
    return row | {name: np.pad(x[:, None], [(0, 0), (0, 3)]) for name, x in loss.items()}


def errors_of(name: str, **sections) -> tuple[float, float]:
    params, rows, losses, gradients = oracle(name)
    step = small_step(config_and_rows(name, **sections)[0])

    @jax.jit
    def run(params, batch):
        _, got, *_ = step.objective.loss_and_grads(params, batch)
        return got, step.objective.token_losses(params, jax.tree.map(lambda x: x[0], batch))

    got, got_losses = run(put_params(step, params), make_batch(step, rows))
    assert all(x.dtype == np.float64 for x in jax.tree.leaves((got, got_losses)))
    order = np.stack([step.sequence_order.arranged(row)[1] for row in rows])
    losses = np.take_along_axis(losses, order, axis=1)
    is_document = ~np.isnan(losses)
    errors = jax.tree.map(lambda a, b: max_relative_error(without_padding(a, b), b), got, gradients)
    return (
        max_relative_error(np.asarray(got_losses)[is_document], losses[is_document]),
        max(jax.tree.leaves(errors)),
    )


def check_generation(name: str, **mesh) -> None:
    """Cached generation, whose logits differ from the oracle's by at most 1e-12 (1 + their size)."""
    params = oracle(name)[0]
    expected = [np.asarray(logits_of(params, tokens)) for tokens in test_generator.prompts_of()]
    test_generator.TOLERANCE = 1e-12
    test_generator._assert_equals_forward_pass(
        small_config(model=MODEL, mesh=mesh), {}, lambda: (params, expected)
    )


# name of the rows, mesh, settings of attention, tile_tokens
CASES = [
    ("packed", dict(context=2, tensor=2), {}, 0),
    ("packed", {}, {}, 0),
    ("packed", dict(context=8), {}, 0),
    ("packed", dict(context=3, tensor=2), dict(ring_payload="keys_values"), 0),
    ("packed", dict(context=2, fsdp=2), {}, 12),
    ("packed", dict(context=2, tensor=2), dict(strategy="ulysses"), 0),
    ("packed", dict(context=4), dict(strategy="hybrid", ulysses_degree=2), 0),
    ("packed", dict(context=4), dict(strategy="all_gather"), 0),
    ("prefixes", {}, {}, 0),
    ("prefixes", dict(context=4, tensor=2), {}, 0),
    ("prefixes", dict(context=4), {}, 12),
    ("prefixes", dict(context=4), dict(strategy="hybrid", ulysses_degree=2), 12),
    ("prefixes", dict(context=2), dict(strategy="ulysses"), 12),
    ("prefixes", dict(context=4), dict(strategy="all_gather"), 0),
    ("trees", dict(context=4, tensor=2), {}, 0),
    ("trees", dict(context=4), {}, 12),
    ("trees", {}, {}, 12),
]


def main() -> None:
    """Without --all, only the trees with ranks of both axes."""
    is_all = sys.argv[1:] == ["--all"]
    both_axes = [
        case for case in CASES if case[0] == "trees" and case[1].keys() == {"context", "tensor"}
    ]
    for mesh in [dict(context=2, tensor=2), *([{}, dict(tensor=4)] if is_all else [])]:
        check_generation("trees", **mesh)
    for name, mesh, attention, tile_tokens in CASES if is_all else both_axes:
        sections = dict(mesh=mesh, attention=attention, memory=dict(tile_tokens=tile_tokens))
        print(name, sections, *errors_of(name, **sections), flush=True)


if __name__ == "__main__":
    main()
