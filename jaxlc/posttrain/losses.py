"""Losses that are functions of the log-probabilities of a batch's targets: preference and policy
losses.

Such a loss may combine all tokens of an answer, and of the answers of a pair. Its gradient with
respect to the logits is that of cross entropy with other weights: minus its gradient with respect
to each log-probability. So the chunked cross entropy of `step.loss` computes it, after a first pass
over the head that returns the log-probabilities.

    dpo      Rafailov et al. 2023, arXiv:2305.18290, equation 7; label smoothing: Mitchell 2023 (cDPO)
    simpo    Meng et al. 2024, arXiv:2405.14734, equation 6
    kto      Ethayarajh et al. 2024, arXiv:2402.01306, equation 8; the mismatched answers: `trees.labeled_steps`
    apo_zero_unpaired     D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7, of one answer
    grpo     Shao et al. 2024, arXiv:2402.03300, equation 3; the KL divergence is its equation 4 (k3)
    dapo     Yu et al. 2025, arXiv:2503.14476, equation 8: clip-higher, mean over tokens
    dr_grpo  Liu et al. 2025, arXiv:2503.20783: sums over tokens, divided by a constant
    cispo    MiniMax 2025, arXiv:2506.13585, equations 4 and 5, without a lower limit
    reverse_kl            the KL divergence from a teacher at sampled tokens: Lu et al. 2025, "On-policy distillation"
    ratio    of sequences: Zheng et al. 2025 (GSPO), arXiv:2507.18071, equation 7
    delta    Team Prime Intellect 2025 (INTELLECT-2), arXiv:2505.07291, section 3.4
    off-policy mask       DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, equation 9
    importance weights    of token_truncate: Yao et al. 2025, "Your efficient RL framework secretly brings you
                          off-policy RL training"

Three log-probabilities of a token are never mixed: `sampled`, which the sampler recorded; `old`, which the trainer
computes before its first update on the answer; and `new`, of the parameters that are trained. The ratio is new / old.
The importance weight is old / sampled, limited and without a gradient: it corrects the difference between sampler and
trainer, and the age of the sampler's parameters.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlc.config.schema import PosttrainConfig
from jaxlc.core import UserError
from jaxlc.data.sequences.loader import Batch

# (log-probability of each target, float32 [sequences, tokens], arrays of a microbatch) -> the sum
# of its losses
PolicyLoss = Callable[[jax.Array, Batch], jax.Array]


class PolicySums(NamedTuple):
    """Sums over the tokens of a microbatch (preference losses: the pairs, or the labeled answers),
    float32; None if the loss has none. See `means`.
    """

    loss: jax.Array
    ratio: jax.Array | None = None  # of new to old probabilities
    clipped: jax.Array | None = None  # tokens whose gradient is clipped
    # k3 estimate of the divergence from the reference; kto: its estimate from mismatched answers;
    # reverse_kl: old minus teacher's log-probability
    kl: jax.Array | None = None
    # Sampled minus old log-probability; NaN if a token of the step has no record.
    sampler_minus_trainer: jax.Array | None = None
    sampler_difference: jax.Array | None = None  # its magnitude
    sampler_difference_max: jax.Array | None = None  # not a sum: see `over_microbatches`
    weight: jax.Array | None = None  # importance weights
    weight_cut: jax.Array | None = None  # tokens whose weight is outside of its limits
    weight_cut_answers: jax.Array | None = None  # the sum over answers of the share of these tokens
    # tokens of answers that off_policy_mask_threshold leaves out
    off_policy: jax.Array | None = None
    off_policy_answers: jax.Array | None = None
    entropy: jax.Array | None = None  # of the next token, in nats, at posttrain.temperature
    # Of the implicit rewards of the two answers; of a labeled answer, its reward times 1 or -1
    margin: jax.Array | None = None
    # pairs whose margin is positive; labeled answers on the right side of the divergence
    accuracy: jax.Array | None = None


def means(sums: PolicySums, batch: Batch, settings: PosttrainConfig) -> PolicySums:
    """The means over a step of the sums over all its microbatches."""
    tokens = total = denominator(batch, settings)
    if settings.is_policy:
        tokens = batch.loss_weights.sum()

    def mean(name, x):
        if name.endswith("_max"):
            return x
        divisor = total if name == "loss" else tokens
        if name.endswith("_answers"):
            divisor = (batch.loss_weights * batch.answer_weights).sum()
        return jnp.where(divisor > 0, x / divisor, 0)

    columns = sums._asdict().items()
    return PolicySums(**{name: None if x is None else mean(name, x) for name, x in columns})


def over_microbatches(parts):
    """The sums, or maxima of fields that end in "_max", over the first dimension of a tree."""

    def total(path, x):
        return x.max(0) if jax.tree_util.keystr(path).endswith("_max") else x.sum(0)

    return jax.tree.map_with_path(total, parts)


def denominator(batch: Batch, settings: PosttrainConfig) -> jax.Array:
    """What the sum of the losses of a step is divided by: pairs, answers or tokens; without
    posttrain.loss tokens. float32.

    Args:
      batch: of any leading dimensions.
    """
    if settings.is_pairwise:
        return batch.answer_weights.sum() / 2
    if settings.is_labeled:
        return jnp.where(batch.advantages != 0, batch.answer_weights, 0).sum()
    if settings.loss in ("", "dapo", "cispo", "reverse_kl"):
        return batch.loss_weights.sum()
    answers = batch.answer_weights.sum()
    return answers * settings.max_answer_tokens if settings.loss == "dr_grpo" else answers


def policy_sums(
    log_probs_BT: jax.Array,
    batch: Batch,
    settings: PosttrainConfig,
    custom: PolicyLoss | None = None,
    kl: jax.Array | None = None,
) -> PolicySums:
    """The loss of a microbatch, from the log-probability of each target, float32 [sequences,
    tokens].

    Tokens are in any order; an answer is whole in its sequence.

    Args:
      custom: a loss instead of the formula of posttrain.loss.
      kl: of a step with kto, see `divergence`; None: that of the microbatch.
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
    if settings.is_labeled:
        if settings.loss == "kto" and kl is None:
            kl = divergence(mismatched_sums(jax.lax.stop_gradient(log_probs_BT), batch))
        return _labeled_sums(log_probs_BT, batch, settings, jnp.float32(0) if kl is None else kl)
    loss = _pair_sums if settings.is_pairwise else _clipped_sums
    return loss(log_probs_BT, batch, settings)


def mismatched_sums(log_probs_BT: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The sum of the log-ratios of the mismatched answers of a microbatch, which have no loss, and
    their number.
    """
    weights_BT = jnp.where(batch.loss_weights > 0, 0, batch.answer_weights)
    log_ratios_BT = jnp.where(weights_BT > 0, log_probs_BT - batch.reference_log_probs, 0)
    return log_ratios_BT.sum(), weights_BT.sum()


def divergence(sums: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The estimate of the KL divergence from the reference, from `mismatched_sums`."""
    total, num_answers = sums
    return jnp.where(num_answers > 0, jnp.maximum(total / num_answers, 0), 0)


def _labeled_sums(
    log_probs_BT: jax.Array, batch: Batch, settings: PosttrainConfig, kl: jax.Array
) -> PolicySums:
    """Advantages are 1 for answers whose label is true, and -1 for others."""
    log_ratios_BT = batch.loss_weights * (log_probs_BT - batch.reference_log_probs)
    rewards_BA = settings.beta * _sums_by(batch.segment_ids, log_ratios_BT)
    labels_BA = jnp.sign(_sums_by(batch.segment_ids, batch.answer_weights * batch.advantages))
    gains_BA = labels_BA * (rewards_BA - settings.beta * kl)
    weights_BA = jnp.where(labels_BA > 0, settings.desirable_weight, settings.undesirable_weight)
    is_answer_BA = labels_BA != 0
    return PolicySums(
        loss=jnp.where(is_answer_BA, weights_BA * jax.nn.sigmoid(-gains_BA), 0).sum(),
        kl=(kl * is_answer_BA).sum(),
        margin=(labels_BA * rewards_BA).sum(),
        accuracy=(gains_BA > 0).sum(dtype=jnp.float32),
    )


def _pair_sums(log_probs_BT: jax.Array, batch: Batch, settings: PosttrainConfig) -> PolicySums:
    """A pair is the two answers of one prefix; advantages are 1 for the chosen one and -1 for the
    rejected one.
    """
    if settings.loss == "simpo":
        scores_BT = batch.answer_weights * log_probs_BT
        target = settings.target_margin
    else:
        scores_BT = batch.loss_weights * (log_probs_BT - batch.reference_log_probs)
        target = 0.0
    ids_BT = batch.prefix_ids[..., 0]
    margins_BP = _sums_by(ids_BT, batch.advantages * settings.beta * scores_BT)
    is_pair_BP = _sums_by(ids_BT, batch.answer_weights) > 0
    smoothing = settings.label_smoothing
    gaps_BP = margins_BP - target
    losses_BP = -(1 - smoothing) * jax.nn.log_sigmoid(gaps_BP) - smoothing * jax.nn.log_sigmoid(
        -gaps_BP
    )
    return PolicySums(
        loss=jnp.where(is_pair_BP, losses_BP, 0).sum(),
        margin=jnp.where(is_pair_BP, margins_BP, 0).sum(),
        accuracy=(is_pair_BP & (margins_BP > 0)).sum(dtype=jnp.float32),
    )


def _clipped_sums(log_probs_BT: jax.Array, batch: Batch, settings: PosttrainConfig) -> PolicySums:
    has_loss_BT = batch.loss_weights > 0
    sampled_BT = batch.sampled_log_probs

    def difference(a_BT, b_BT):
        return jnp.where(has_loss_BT, a_BT - b_BT, 0)

    new_BT = jax.lax.stop_gradient(log_probs_BT)
    olds = dict(policy=new_BT, record=batch.old_log_probs, sampled=sampled_BT)
    old_BT = olds[settings.old_log_probs]
    log_ratios_BT = difference(log_probs_BT, old_BT)
    columns = {}
    sums = {}
    if settings.loss == "reverse_kl":
        batch = batch._replace(advantages=difference(batch.reference_log_probs, old_BT))
        columns["kl"] = -batch.advantages
    if settings.ratio == "sequence":
        log_ratios_BT = _over_answers(batch, batch.answer_weights * log_ratios_BT)
    ratios_BT = jnp.exp(log_ratios_BT)
    gains_BT, is_clipped_BT = _gains(ratios_BT, log_probs_BT, batch, settings)
    losses_BT = -gains_BT
    columns |= dict(ratio=ratios_BT, clipped=is_clipped_BT)
    if sampled_BT is not None:
        gap_BT = difference(sampled_BT, old_BT)
        columns |= dict(sampler_minus_trainer=gap_BT, sampler_difference=jnp.abs(gap_BT))
        sums = dict(sampler_difference_max=columns["sampler_difference"].max())
    if settings.off_policy_mask_threshold:
        drift_BT = batch.answer_weights * difference(sampled_BT, new_BT)
        is_high_BT = _over_answers(batch, drift_BT) > settings.off_policy_mask_threshold
        columns |= dict(off_policy=is_high_BT & (batch.advantages < 0))
        losses_BT = jnp.where(columns["off_policy"], 0, losses_BT)
    if settings.importance_weights:
        weights_BT, is_cut_BT = _importance_weights(difference(old_BT, sampled_BT), batch, settings)
        losses_BT *= weights_BT
        columns |= dict(weight=weights_BT, weight_cut=is_cut_BT)
    if settings.kl:
        gap_BT = difference(batch.reference_log_probs, log_probs_BT)
        columns |= dict(kl=jnp.exp(gap_BT) - gap_BT - 1)
        losses_BT += settings.kl * columns["kl"]
    for name, x_BT in columns.items():
        sums[name] = (batch.loss_weights * x_BT).sum()
        if f"{name}_answers" in PolicySums._fields:
            sums[f"{name}_answers"] = (batch.loss_weights * batch.answer_weights * x_BT).sum()
    weights_BT = batch.loss_weights * (batch.answer_weights if settings.loss == "grpo" else 1)
    return PolicySums((weights_BT * losses_BT).sum(), **sums)


def _gains(
    ratios_BT: jax.Array, log_probs_BT: jax.Array, batch: Batch, settings: PosttrainConfig
) -> tuple[jax.Array, jax.Array]:
    """What the policy gains with each token, and whether the ratio is limited."""
    highest = 1 + settings.clip_high
    if settings.loss == "cispo":
        limited_BT = jax.lax.stop_gradient(jnp.minimum(ratios_BT, highest))
        return limited_BT * batch.advantages * log_probs_BT, ratios_BT > highest
    clipped_BT = jnp.clip(ratios_BT, 1 - settings.clip_low, highest)
    limited_BT = jnp.minimum(ratios_BT, settings.delta) if settings.delta else ratios_BT
    gains_BT = jnp.minimum(limited_BT * batch.advantages, clipped_BT * batch.advantages)
    return gains_BT, gains_BT != ratios_BT * batch.advantages


def _importance_weights(
    log_ratios_BT: jax.Array, batch: Batch, settings: PosttrainConfig
) -> tuple[jax.Array, jax.Array]:
    """The weights of old to sampled probabilities, within their limits, and which were outside.

    Args:
      log_ratios_BT: old minus sampled log-probability, 0 where there is no loss; no gradient.
    """
    level, limit = settings.weight_mode.split("_")
    if level != "token":
        is_mean = level == "geometric"
        log_ratios_BT = _over_answers(
            batch, log_ratios_BT * (batch.answer_weights if is_mean else 1)
        )
    lowest = settings.weight_min
    highest = settings.weight_max or jnp.inf
    weights_BT = jnp.exp(log_ratios_BT)
    is_cut_BT = (weights_BT < lowest) | (weights_BT > highest)
    cut_BT = jnp.clip(weights_BT, lowest, highest) if limit == "truncate" else 0
    return jnp.where(is_cut_BT, cut_BT, weights_BT), is_cut_BT


def _over_answers(batch: Batch, x_BT: jax.Array) -> jax.Array:
    """The sum of x over the tokens of the answer, or document, of each token."""
    sums_BP = _sums_by(batch.segment_ids, x_BT)
    return jnp.take_along_axis(sums_BP, batch.segment_ids, axis=1)


def _sums_by(ids_BT: jax.Array, x_BT: jax.Array) -> jax.Array:
    """The sum of x over the tokens with each id, float32 [sequences, ids]; ids are at most the
    number of tokens.
    """
    num_ids = ids_BT.shape[1] + 1
    return jax.vmap(lambda ids, x: jax.ops.segment_sum(x, ids, num_ids))(ids_BT, x_BT)
