"""Losses that are functions of the log-probabilities of a batch's targets: preference and policy
losses.

Such a loss may combine all tokens of an answer, and of the answers of a pair. Its gradient with
respect to the logits is that of cross entropy with other weights: minus its gradient with respect
to each log-probability. So the chunked cross entropy of `step.loss` computes it, after a first pass
over the head that returns the log-probabilities.

    dpo      Rafailov et al. 2023, arXiv:2305.18290, equation 7; label smoothing: Mitchell 2023 (cDPO)
    grpo     Shao et al. 2024, arXiv:2402.03300, equation 3; the KL divergence is its equation 4 (k3)
    dapo     Yu et al. 2025, arXiv:2503.14476, equation 8: clip-higher, mean over tokens
    dr_grpo  Liu et al. 2025, arXiv:2503.20783: sums over tokens, divided by a constant
    ratio    of sequences: Zheng et al. 2025 (GSPO), arXiv:2507.18071, equation 7
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlc.config.schema import PosttrainConfig
from jaxlc.core.errors import UserError
from jaxlc.data.sequences.loader import Batch

# (log-probability of each target, float32 [sequences, tokens], arrays of a microbatch) -> the sum
# of its losses
PolicyLoss = Callable[[jax.Array, Batch], jax.Array]


class PolicySums(NamedTuple):
    """Sums over the tokens (dpo: the pairs) of a microbatch, float32; None if the loss has none.
    See `means`.
    """

    loss: jax.Array
    ratio: jax.Array | None = None  # of new to old probabilities
    clipped: jax.Array | None = None  # tokens whose gradient is clipped
    kl: jax.Array | None = None  # k3 estimate of the divergence from the reference
    # Log-probability of the sampler, as recorded, minus that of the trainer; NaN if a token of the
    # step has no record.
    sampler_minus_trainer: jax.Array | None = None
    sampler_difference: jax.Array | None = None  # its magnitude
    margin: jax.Array | None = None  # dpo: of the implicit rewards of the two answers
    accuracy: jax.Array | None = None  # dpo: pairs whose margin is positive


def means(sums: PolicySums, batch: Batch, settings: PosttrainConfig) -> PolicySums:
    """The means over a step of the sums over all its microbatches."""
    total = denominator(batch, settings)
    others = total if settings.loss == "dpo" else batch.loss_weights.sum()

    def mean(x, total):
        return jnp.where(total > 0, x / total, 0)

    return jax.tree.map(lambda x: mean(x, others), sums)._replace(loss=mean(sums.loss, total))


def denominator(batch: Batch, settings: PosttrainConfig) -> jax.Array:
    """What the sum of the losses of a step is divided by: pairs, answers or tokens. float32.

    Args:
      batch: of any leading dimensions.
    """
    if settings.loss == "dpo":
        return batch.answer_weights.sum() / 2
    if settings.loss == "dapo":
        return batch.loss_weights.sum()
    answers = batch.answer_weights.sum()
    return answers * settings.max_answer_tokens if settings.loss == "dr_grpo" else answers


def policy_sums(
    log_probs_BT: jax.Array,
    batch: Batch,
    settings: PosttrainConfig,
    custom: PolicyLoss | None = None,
) -> PolicySums:
    """The loss of a microbatch, from the log-probability of each target, float32 [sequences,
    tokens].

    Tokens are in any order; an answer is whole in its sequence.

    Args:
      custom: a loss instead of the formula of posttrain.loss.
    Raises:
      UserError: it does not return a number.
    """
    if custom is not None:
        loss = jnp.asarray(custom(log_probs_BT, batch), jnp.float32)
        if loss.shape:
            raise UserError(
                f"policy_loss returned {loss.shape}: expected the sum of the losses of the batch, a number"
            )
        return PolicySums(loss=loss)
    loss = _preference_sums if settings.loss == "dpo" else _clipped_sums
    return loss(log_probs_BT, batch, settings)


def _preference_sums(
    log_probs_BT: jax.Array, batch: Batch, settings: PosttrainConfig
) -> PolicySums:
    """A pair is the two answers of one prefix; advantages are 1 for the chosen one and -1 for the
    rejected one.
    """
    rewards_BT = settings.beta * batch.loss_weights * (log_probs_BT - batch.reference_log_probs)
    margins_BP = _sums_by(batch.prefix_ids, batch.advantages * rewards_BT)
    is_pair_BP = _sums_by(batch.prefix_ids, batch.answer_weights) > 0
    smoothing = settings.label_smoothing
    losses_BP = -(1 - smoothing) * jax.nn.log_sigmoid(margins_BP) - smoothing * jax.nn.log_sigmoid(
        -margins_BP
    )
    return PolicySums(
        loss=jnp.where(is_pair_BP, losses_BP, 0).sum(),
        margin=jnp.where(is_pair_BP, margins_BP, 0).sum(),
        accuracy=(is_pair_BP & (margins_BP > 0)).sum(dtype=jnp.float32),
    )


def _clipped_sums(log_probs_BT: jax.Array, batch: Batch, settings: PosttrainConfig) -> PolicySums:
    has_loss_BT = batch.loss_weights > 0
    uses_records = settings.old_log_probs == "record"
    old_BT = batch.old_log_probs if uses_records else jax.lax.stop_gradient(log_probs_BT)
    log_ratios_BT = jnp.where(has_loss_BT, log_probs_BT - old_BT, 0)
    if settings.ratio == "sequence":
        means_BP = _sums_by(batch.segment_ids, batch.answer_weights * log_ratios_BT)
        log_ratios_BT = jnp.take_along_axis(means_BP, batch.segment_ids, axis=1)
    ratios_BT = jnp.exp(log_ratios_BT)
    clipped_BT = jnp.clip(ratios_BT, 1 - settings.clip_low, 1 + settings.clip_high)
    gains_BT = jnp.minimum(ratios_BT * batch.advantages, clipped_BT * batch.advantages)
    losses_BT, kl_BT = -gains_BT, None
    if settings.kl:
        difference_BT = jnp.where(has_loss_BT, batch.reference_log_probs - log_probs_BT, 0)
        kl_BT = jnp.exp(difference_BT) - difference_BT - 1
        losses_BT += settings.kl * kl_BT
    weights_BT = batch.loss_weights * (batch.answer_weights if settings.loss == "grpo" else 1)
    is_clipped_BT = gains_BT < ratios_BT * batch.advantages
    sampler_columns = (None, None)
    if batch.old_log_probs is not None:
        difference_BT = jnp.where(
            has_loss_BT, batch.old_log_probs - jax.lax.stop_gradient(log_probs_BT), 0
        )
        sampler_columns = difference_BT, jnp.abs(difference_BT)
    columns = (ratios_BT, is_clipped_BT, kl_BT, *sampler_columns)
    sums = (None if x is None else (batch.loss_weights * x).sum() for x in columns)
    return PolicySums((weights_BT * losses_BT).sum(), *sums)


def _sums_by(ids_BT: jax.Array, x_BT: jax.Array) -> jax.Array:
    """The sum of x over the tokens with each id, float32 [sequences, ids]; ids are at most the
    number of tokens.
    """
    num_ids = ids_BT.shape[1] + 1
    return jax.vmap(lambda ids, x: jax.ops.segment_sum(x, ids, num_ids))(ids_BT, x_BT)
