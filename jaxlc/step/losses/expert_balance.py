"""Losses and measures of the balance of experts, from the sums that layers with experts return.

Sums are over the tokens of a microbatch on all ranks: text, prompts without loss included, a shared prefix once, and no
padding. The balance loss of a microbatch, E sum_e f_e P_e with the fraction f_e of assignments and the mean probability
P_e of expert e (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6), is not linear in the sums: it is computed from
those of all ranks (Qiu et al. 2025, arXiv:2501.11873). That of a step is the mean over its microbatches.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlc.config import ModelConfig, TrainConfig


class ExpertSums(NamedTuple):
    """The sums over the microbatches of a step; float32. L counts layers with experts."""

    balance_loss: jax.Array
    router_z_loss: jax.Array
    counts_LE: jax.Array  # assignments to each expert, exact up to 2^24


class ExpertMetrics(NamedTuple):
    """The balance of a step, float32. L counts layers with experts."""

    balance_loss: jax.Array  # without its coefficient; the number of experts per token if all have equal loads
    router_z_loss: jax.Array  # without its coefficient: mean of the squared log of the router's normalizer
    load_LE: jax.Array  # assignments of each expert, divided by the mean of the layer


def expert_sums(sums: dict[str, jax.Array], segment_ids: jax.Array, train: TrainConfig) -> ExpertSums:
    """The losses of a microbatch.

    Args:
      sums: of the layers, as `models.blocks.experts` returns them, [L, ...].
      segment_ids: of the microbatch; 0 is padding.
    """
    counts_LE, probs_LE = sums["expert_counts"], sums["expert_probs"]
    num_layers, num_experts = counts_LE.shape
    num_tokens = jnp.maximum((segment_ids > 0).sum(dtype=jnp.float32), 1)
    if train.balance_loss_over == "layers":
        fractions, means = counts_LE.sum(0) / (num_layers * num_tokens), probs_LE.sum(0) / (num_layers * num_tokens)
    else:
        fractions, means = counts_LE / num_tokens, probs_LE / num_tokens / num_layers
    return ExpertSums(
        balance_loss=num_experts * (fractions * means).sum(),
        router_z_loss=sums["router_z"].mean() / num_tokens,
        counts_LE=counts_LE,
    )


def weighted_loss(sums: ExpertSums, train: TrainConfig) -> jax.Array:
    """What the losses of a microbatch add to the mean loss."""
    return train.balance_loss * sums.balance_loss + train.router_z_loss * sums.router_z_loss


def expert_metrics(sums: ExpertSums, num_microbatches: int) -> ExpertMetrics:
    """The metrics of a step."""
    mean_L1 = jnp.maximum(sums.counts_LE.mean(1, keepdims=True), 1 / sums.counts_LE.shape[1])
    return ExpertMetrics(
        balance_loss=sums.balance_loss / num_microbatches,
        router_z_loss=sums.router_z_loss / num_microbatches,
        load_LE=sums.counts_LE / mean_L1,
    )


def with_balanced_biases(
    params: dict, counts_LE: jax.Array, is_finite: jax.Array, model: ModelConfig, train: TrainConfig
) -> dict:
    """The parameters with the biases of the choice after a step (DeepSeek V3, arXiv:2412.19437, section 2.1.2).

    Args:
      params: the trained parameters; frozen biases, which it does not have, do not change.
      counts_LE: the assignments of the step.
      is_finite: if False, the step is skipped.
    """
    with_experts = [i for i, kind in enumerate(model.kinds_of_layers) if model.of_kind(kind).feed_forward == "experts"]
    change_LE = train.balance_bias_rate * jnp.sign(counts_LE.mean(1, keepdims=True) - counts_LE)
    change_LE = jnp.where(is_finite, change_LE, 0)
    for stack, layers in model.layer_stacks.items():
        if layers[0] in with_experts:
            rows = jnp.array([with_experts.index(layer) for layer in layers])
            params = _with_added(params, (*stack, "mlp", "choice_bias"), change_LE[rows])
    return params


def _with_added(tree: dict, path: tuple[str, ...], change: jax.Array) -> dict:
    """`tree` with `change` added to an entry, if it has the entry."""
    name, *inner = path
    if name not in tree:
        return tree
    return {**tree, name: _with_added(tree[name], tuple(inner), change) if inner else tree[name] + change}
