"""Prints the largest relative errors of shared prefixes against separate rows, with the training
step in float64.

    python -m tests.step.float64_parity

It runs in a process of its own: before the package is imported, float32 is replaced by float64. So
the errors that are left are those of the algorithm, not of rounding.
"""

import jax
import jax.numpy as jnp

import tests.conftest  # noqa: F401  simulated devices

jax.config.update("jax_enable_x64", True)
jnp.float32 = jnp.float64

import numpy as np  # noqa: E402

from jaxlc.data.sequences.loader import array_dtypes  # noqa: E402
from jaxlc.data.sequences.user_batches import complete_batch  # noqa: E402
from tests.step import test_policy_loss as policy_loss  # noqa: E402
from tests.step.synthetic import (  # noqa: E402
    HYBRID,
    KIMI_DELTA,
    LATENT,
    MAMBA,
    TOKENS,
    gradients_and_loss,
    make_batch,
    put_params,
    small_config,
    small_step,
    without_padding,
)
from tests.tolerances import max_relative_error  # noqa: E402
from tests.trees import random_documents, separate_rows  # noqa: E402

CASES = [
    ("grpo", "recurrent tiles", dict(context=4, tensor=2), {}),
    ("", "sliding tiles", dict(context=4), dict(strategy="hybrid", ulysses_degree=2)),
    ("grpo", "recurrent", dict(context=4, tensor=2), {}),
    ("grpo", "latent tiles", dict(context=4), dict(strategy="hybrid", ulysses_degree=2)),
    ("dapo", "sliding", dict(context=2), {}),
    ("dpo", "lora", dict(context=2), dict(strategy="all_gather")),
]
# Models, meshes and further sections, for trees of five levels of documents.
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_ffn_dim=24, shared_ffn_dim=16)
MIXED = LATENT | EXPERTS | dict(layer_kinds=("sliding", "latent"), window=6)
# attention and Mamba-2 side by side
SIDE_BY_SIDE = MAMBA | dict(layer_kinds=("full_mamba2",))
SLIDING, TILES = policy_loss.KINDS["sliding"]["model"], dict(memory=dict(tile_tokens=12))
DEEP = [
    (MIXED, dict(context=4), {}),
    (MAMBA, dict(context=4), TILES),
    (policy_loss.QUERY_SCALE, dict(context=1), {}),
    (policy_loss.QUERY_SCALE, dict(context=2, tensor=2), dict(attention=dict(strategy="ulysses"))),
    (SLIDING, dict(context=2), dict(attention=dict(strategy="all_gather"))),
    (SLIDING, dict(context=4), dict(attention=dict(strategy="hybrid", ulysses_degree=2)) | TILES),
    (MIXED, dict(context=2, tensor=2), dict(attention=dict(strategy="all_gather"))),
    (MIXED, dict(context=4), TILES),
    (HYBRID | policy_loss.QUERY_SCALE, dict(context=4, tensor=2), {}),
    (HYBRID, dict(context=2), TILES),
    (SIDE_BY_SIDE, dict(context=4, tensor=2), TILES),
    (MAMBA | EXPERTS, dict(context=2, tensor=2), TILES),
    (KIMI_DELTA, dict(context=4), TILES),
    (KIMI_DELTA | EXPERTS, dict(context=2), dict(attention=dict(strategy="ulysses"))),
    (SIDE_BY_SIDE, dict(context=4), dict(attention=dict(strategy="ulysses"))),
]


def deep_rows(seed: int) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """A batch of the caller with trees, and one with each document after copies of its prefixes,
    which have no loss.
    """
    documents, rng = random_documents(TOKENS, 4, seed), np.random.default_rng(seed)
    numbers, lengths = np.arange(1, len(documents) + 1), [length for length, _ in documents]
    ids = np.repeat([numbers, [parent for _, parent in documents]], lengths, axis=1)
    padded = np.pad(ids, [(0, 0), (0, TOKENS - ids.shape[1])])
    tree = dict(
        tokens=rng.integers(1, 61, TOKENS),
        targets=rng.integers(1, 61, TOKENS),
        loss_weights=rng.uniform(size=TOKENS) * (padded[0] > 0),
        segment_ids=padded[0],
        prefix_ids=padded[1],
    )
    rows = []
    for places, length in zip(separate_rows(documents), lengths):
        row = {name: np.zeros(TOKENS, x.dtype) for name, x in tree.items() if name != "prefix_ids"}
        for name in ("tokens", "targets", "loss_weights"):
            row[name][: len(places)] = tree[name][places]
        row["loss_weights"][: len(places) - length] = 0
        row["segment_ids"][: len(places)] = 1
        rows.append(row)
    return {name: x[None] for name, x in tree.items()}, jax.tree.map(lambda *x: np.stack(x), *rows)


def deep_results(batch, params=None, **sections):
    """(parameters, gradients, loss) of a batch of the caller."""
    num_rows = len(batch["tokens"])
    config = small_config(train=dict(global_batch_size=num_rows, eval_sequences=1), **sections)
    arrays = complete_batch(batch, (num_rows, TOKENS), 61, "batch", array_dtypes(config))
    step = small_step(config)
    params = step.init().params if params is None else put_params(step, params)
    rows = [{name: x[i] for name, x in arrays.items()} for i in range(num_rows)]
    return params, *jax.jit(gradients_and_loss(step))(params, make_batch(step, rows))


def report(name: str, got, got_loss, gradients, expected) -> None:
    assert all(x.dtype == np.float64 for x in (got_loss, *jax.tree.leaves(got)))
    errors = jax.tree.map(lambda a, b: max_relative_error(without_padding(a, b), b), got, gradients)
    largest = max(jax.tree.leaves(errors))
    print(name, max_relative_error(got_loss, expected), largest, flush=True)


def main() -> None:
    for loss, kinds, mesh, attention in CASES:
        params, gradients, expected = policy_loss.separate_rows(loss, kinds)
        config = policy_loss.config_with(
            loss, **policy_loss.KINDS[kinds], mesh=mesh, attention=attention
        )
        _, *got = policy_loss.results(config, loss, params)
        report(f"{loss} {kinds}", *got, gradients, expected)
    for kinds in ("", "replay"):  # answers share tokens in the loss
        params, gradients, expected = policy_loss.branching_rows("dapo", kinds)
        sections = policy_loss.KINDS[kinds] | dict(mesh=dict(context=4))
        config, groups = (
            policy_loss.config_with("dapo", shares=3, **sections),
            policy_loss.branching(),
        )
        _, *got = policy_loss.results(config, "dapo", params, groups)
        report(f"branching {kinds}", *got, gradients, expected)
    for seed, (model, mesh, sections) in enumerate(DEEP):
        tree, rows = deep_rows(seed)
        params, gradients, expected = deep_results(rows, model=model)
        attention = dict(sections.get("attention", {}), shared_prefixes=4)
        sections = sections | dict(model=model, mesh=mesh, attention=attention)
        _, *got = deep_results(tree, params, **sections)
        report(f"{seed} {model.get('layer_kinds')} {mesh}", *got, gradients, expected)


if __name__ == "__main__":
    main()
