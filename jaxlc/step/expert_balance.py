"""Losses and measures of the balance of experts, from the sums that layers with experts return.

Sums are over the tokens of a microbatch on all ranks: text, prompts without loss included, a shared prefix once, and no
padding. The balance loss of a microbatch, E sum_e f_e P_e with the fraction f_e of assignments and the mean probability
P_e of expert e (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6), is not linear in the sums: it is computed from
those of all ranks (Qiu et al. 2025, arXiv:2501.11873). That of a step is the mean over its microbatches.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlc.config import TrainConfig


class ExpertSums(NamedTuple):
    """The sums over the microbatches of a step; float32. L counts layers with experts."""

    balance_loss: jax.Array
    router_z_loss: jax.Array
    counts_LE: jax.Array  # assignments to each expert, exact up to 2^24


class ExpertMetrics(NamedTuple):
    """The balance of a step, float32. L counts layers with experts."""

    balance_loss: jax.Array  # without its coefficient; the number of experts per token if all have equal loads
    router_z_loss: jax.Array  # without its coefficient: mean of the squared log of the router's normalizer
    expert_load_L: jax.Array  # assignments of the expert with the most, divided by the mean of all experts
    expert_entropy_L: jax.Array  # entropy of the assignments, as a fraction of that of equal loads
    unused_experts_L: jax.Array  # experts without a token


def expert_sums(sums: dict[str, jax.Array], segment_ids: jax.Array, train: TrainConfig) -> ExpertSums:
    """The losses of a microbatch.

    Args:
      sums: of the layers, as `models.experts` returns them, [L, ...].
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
    counts_LE = sums.counts_LE
    num_experts = counts_LE.shape[1]
    total_L1 = jnp.maximum(counts_LE.sum(1, keepdims=True), 1)
    fractions_LE = counts_LE / total_L1
    entropy_L = -(fractions_LE * jnp.log(jnp.where(fractions_LE > 0, fractions_LE, 1))).sum(1)
    return ExpertMetrics(
        balance_loss=sums.balance_loss / num_microbatches,
        router_z_loss=sums.router_z_loss / num_microbatches,
        expert_load_L=fractions_LE.max(1) * num_experts,
        expert_entropy_L=entropy_L / jnp.log(max(2.0, num_experts)),
        unused_experts_L=(counts_LE == 0).sum(1, dtype=jnp.float32),
    )
