"""Final norm and cross entropy over a long sequence and a large vocabulary, one chunk of tokens at a time.

At a million tokens the logits of Llama 3 would take 538 GB, and the normed hidden states 8 GiB. Each rank loops over
chunks of its tokens: it norms the chunk, gathers it over tensor, multiplies by its shard of the head, and reduces (max,
sum of exponentials, target logit) over tensor (Megatron-LM's vocabulary-parallel loss, Shoeybi et al. 2019, section 3).
The gradient of the chunk is computed in the same iteration, so the backward pass recomputes nothing and the head is
read once. It overwrites the chunk of x, so only one array of full sequence length exists.

Size of a chunk
---------------
The memory that the training state leaves free decides how many tokens have their logits computed at once. Each chunk
adds its gradient to the float32 gradient of the output head [D, V], in device memory: 4.2 GB of traffic for an 8B
model, about as long as the chunk's matrix products with 1,024 tokens. Larger chunks do that less often.

Distillation
------------
With a teacher, the loss of a token is the KL divergence of the student from the teacher, over the teacher's most
probable next tokens and one bucket for all others. Its gradient with respect to the logits is the softmax minus a
target distribution: the teacher's probabilities, and in the bucket the student's, scaled to the teacher's probability
of it.

Losses of experts
-----------------
They are computed from the sums that layers with experts return. Sums are over the tokens of a microbatch on all ranks:
text, prompts without loss included, a shared prefix once, and no padding. The balance loss of a microbatch, E sum_e f_e
P_e with the fraction f_e of assignments and the mean probability P_e of expert e (Fedus et al. 2021, arXiv:2101.03961,
equations 4 to 6), is not linear in the sums: it is computed from the sums of all ranks (Qiu et al. 2025,
arXiv:2501.11873). The balance loss of a step is the mean over its microbatches.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.config import Config, ModelConfig, TrainConfig
from jaxlc.config.flops import loss_chunk_tokens
from jaxlc.core import BATCH_AXES, CONTEXT, TENSOR, UserError, hardware, scopes
from jaxlc.models.block import over_chunks, rms_norm
from jaxlc.sharding.mesh import Nodes, shard_map
from jaxlc.sharding.rules import axes_of, copy_spec, storage_spec


def chunk_tokens(config: Config, mesh: Mesh) -> int:
    """`loss_chunk_tokens` on the devices of a mesh."""
    device = hardware.find(mesh.devices.flat[0].device_kind)
    return loss_chunk_tokens(config.model, config, device)


_TOKENS = (BATCH_AXES, (CONTEXT, TENSOR))  # the last two dimensions of targets and weights
_HEAD = PartitionSpec(None, TENSOR)
_HEAD_DIMS = ("model", "vocab")  # the dimensions of head_DV, as `sharding.rules` names them
_SUM_AXES = (*BATCH_AXES, CONTEXT)

# `(logits float32 [tokens, vocab_size], targets int32 [tokens]) -> losses float32 [tokens]`, differentiable. It is
# called for one chunk of tokens at a time, so the loss of a token depends on its own logits and target only.
TokenLoss = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The static arguments of `loss_sums` and `sums_and_losses`; hashable."""

    mesh: Mesh
    vocab_size: int  # columns of the head from this index on are padding
    chunk_tokens: int  # tokens per device whose logits exist at the same time
    z_loss: float  # weight of log(Z)^2 (PaLM, section 5)
    norm_epsilon: float
    token_loss: TokenLoss | None = None  # None: cross entropy
    temperature: float = 1.0  # logits are divided by it
    with_entropy: bool = False  # of forward passes: `LossSums.entropy`
    nodes: Nodes | None = None  # whose copy the head is of, if it has a first dimension of nodes

    @classmethod
    def from_config(
        cls,
        config: Config,
        mesh: Mesh,
        token_loss: TokenLoss | None,
        norm_epsilon: float = 0.0,
        nodes: Nodes | None = None,
    ) -> "LossSpec":
        """The arguments for `config` on `mesh`; norm_epsilon is used only with a scale of the final
        norm.
        """
        return cls(
            mesh=mesh,
            vocab_size=config.model.vocab_size,
            chunk_tokens=chunk_tokens(config, mesh),
            z_loss=config.train.z_loss,
            norm_epsilon=norm_epsilon,
            token_loss=token_loss,
            nodes=nodes,
        )

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """The axes that split the tokens, without tensor: of `nodes.mesh`, if there are nodes."""
        return _SUM_AXES if self.nodes is None else self.nodes.axes(_SUM_AXES)


class LossSums(NamedTuple):
    objective: jax.Array  # float32: sum of weight x (loss + z_loss log(Z)^2); it is differentiated
    # float32: sum of weight x loss, in nats for cross entropy; the loss that is reported
    cross_entropy: jax.Array
    entropy: jax.Array | None = None  # float32: sum of weight x entropy of the next token, in nats


def weighted_sums(losses: LossSums, weights: jax.Array) -> LossSums:
    """The sums over tokens, from the values of each token before they are weighted."""
    return jax.tree.map(lambda x: (weights * x).sum(), losses)


class Teacher(NamedTuple):
    """The most probable next tokens of a teacher, by token."""

    tokens: jax.Array  # int32 [..., k]; -1: none. A token with none has the loss 0
    log_probs: jax.Array  # float32 [..., k]


class _ChunkCarry(NamedTuple):
    """The carry of the loop over the chunks of one rank."""

    losses_t: jax.Array  # float32
    x_tD: jax.Array  # with gradients: the processed chunks hold dx_tD
    dscale_D: jax.Array | None  # float32, as dhead_Dv
    dhead_Dv: jax.Array | None  # the gradient from this rank's tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def loss_sums(
    x_BTD: jax.Array,
    scale_D: jax.Array | None,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    spec: LossSpec,
    teacher: Teacher | None = None,
) -> LossSums:
    """Weighted sums of the loss over all ranks; the caller divides by the sum of weights of all microbatches.

    Args:
      x_BTD: final hidden states before the norm, in the compute dtype, layout order; T sharded over context and tensor,
        B over data and fsdp. More dimensions, not sharded, may precede B (tiles of the sequence).
      scale_D: scale of the final norm, float32. None: x_BTD is normed already.
      head_DV: output head in the compute dtype, V padded to a multiple of tensor. Of the copy of a node, it has a first
        dimension of nodes, and its gradient is the sum over the tokens of the node.
      targets_BT: int32.
      weights_BT: float32, 0 at tokens without a target.
      teacher: distillation instead of cross entropy of the targets; it has no gradient.
    """
    return sums_and_losses(x_BTD, scale_D, head_DV, targets_BT, weights_BT, spec, teacher)[0]


def _forward_rule(*arguments):
    sums, _, *gradients = sums_and_losses(*arguments, with_gradients=True)
    return sums, gradients


@jax.named_scope(scopes.LOSS)
def _backward_rule(_spec, gradients, cotangents: LossSums):
    scaled = jax.tree.map(
        lambda gradient: (cotangents.objective * gradient).astype(gradient.dtype), gradients
    )
    return *scaled, None, None, None


loss_sums.defvjp(_forward_rule, _backward_rule)


def sums_and_losses(
    x_BTD,
    scale_D,
    head_DV,
    targets_BT,
    weights_BT,
    spec: LossSpec,
    teacher: Teacher | None = None,
    *,
    with_gradients: bool = False,
):
    """The results of `loss_sums`, and the loss of each token, float32 of the targets' shape; not
    differentiable. With gradients, also dx_BTD, dscale_D and dhead_DV; XLA removes the computation
    of those that no caller uses, such as of a frozen head.
    """
    if head_DV.ndim == len(_HEAD_DIMS):  # not of the copy of a node
        spec = dataclasses.replace(spec, nodes=None)
    mesh = spec.mesh
    local = functools.partial(_local, spec=spec, with_gradients=with_gradients)
    tokens = (*(None,) * (targets_BT.ndim - 2), *_TOKENS)
    tokens, hidden, everywhere = (
        PartitionSpec(*tokens),
        PartitionSpec(*tokens, None),
        PartitionSpec(),
    )
    entropy = everywhere if spec.with_entropy else None
    out_specs = (LossSums(everywhere, everywhere, entropy), tokens)
    if with_gradients:
        out_specs = (*out_specs, hidden, everywhere)
    head = _HEAD
    head_gradient = PartitionSpec(*_gradient_spec(head_DV.shape[-2:], spec))
    if spec.nodes is not None:
        mesh = spec.nodes.mesh
        out_specs, hidden, tokens = jax.tree.map(spec.nodes.spec, (out_specs, hidden, tokens))
        head, head_gradient = (
            PartitionSpec(spec.nodes.outer, *part) for part in (head, head_gradient)
        )
    if with_gradients:
        out_specs = (*out_specs, head_gradient)
    in_specs = (hidden, everywhere, head, tokens, tokens, hidden)
    mapped = shard_map(local, mesh, in_specs, out_specs)
    return mapped(x_BTD, scale_D, head_DV, targets_BT, weights_BT, teacher)


def _gradient_spec(shape: tuple[int, ...], spec: LossSpec) -> PartitionSpec:
    """The sharding of dhead_DV: as it is stored, or as in the copy of a node."""
    if spec.nodes is None:
        return storage_spec(_HEAD_DIMS, shape, spec.mesh)
    return copy_spec(_HEAD_DIMS, shape, spec.nodes)


@jax.named_scope(scopes.LOSS)
def _local(
    x_btD,
    scale_D,
    head_Dv,
    targets_bt,
    weights_bt,
    teacher: Teacher | None,
    *,
    spec: LossSpec,
    with_gradients: bool,
):
    """`sums_and_losses` on one rank; the sums are those over all ranks."""
    if spec.nodes is not None:
        head_Dv = head_Dv[0]
    x_tD = x_btD.reshape(-1, x_btD.shape[-1])
    # of the tokens: targets, weights and teacher
    values_t = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[targets_bt.ndim :]), (targets_bt, weights_bt, teacher)
    )
    parameters = (scale_D, head_Dv) if with_gradients else (None, None)
    losses_t, *gradients = optax.tree.zeros_like((values_t[1], *parameters), jnp.float32)
    carry = _ChunkCarry(losses_t, x_tD, *gradients)

    def process_chunk(carry: _ChunkCarry, start, size: int):
        x_cD, values_c = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, start, size), (carry.x_tD, values_t)
        )
        normed_cD, norm_vjp = jax.vjp(
            lambda x_cD, scale_D: (
                x_cD if scale_D is None else rms_norm(x_cD, scale_D, epsilon=spec.norm_epsilon)
            ),
            x_cD,
            scale_D,
        )
        sums, losses_c, *gradients = _chunk_loss(normed_cD, head_Dv, values_c, spec, with_gradients)
        carry = carry._replace(
            losses_t=lax.dynamic_update_slice_in_dim(carry.losses_t, losses_c, start, 0)
        )
        if not with_gradients:
            return carry, sums
        dnormed_cD, dhead_Dv = gradients
        dx_cD, dscale_D = norm_vjp(dnormed_cD)
        return carry._replace(
            x_tD=lax.dynamic_update_slice_in_dim(carry.x_tD, dx_cD, start, 0),
            dscale_D=None if scale_D is None else carry.dscale_D + dscale_D,
            dhead_Dv=carry.dhead_Dv + dhead_Dv,
        ), sums

    # before the gather over tensor
    chunk_tokens = max(1, spec.chunk_tokens // spec.mesh.shape[TENSOR])
    carry, sums = over_chunks(process_chunk, carry, len(x_tD), chunk_tokens)
    sums = jax.tree.map(lambda per_chunk: lax.psum(per_chunk.sum(), spec.sum_axes), sums)
    losses_bt = carry.losses_t.reshape(targets_bt.shape)
    if not with_gradients:
        return sums, losses_bt
    # each tensor rank norms its own tokens
    dscale_D = lax.psum(carry.dscale_D, (*spec.sum_axes, TENSOR))
    with jax.named_scope(scopes.HEAD_GRADIENT):
        dhead_dv = _sum_to_storage(carry.dhead_Dv, spec).astype(head_Dv.dtype)
    return sums, losses_bt, carry.x_tD.reshape(x_btD.shape), dscale_D, dhead_dv


def _sum_to_storage(dhead_Dv: jax.Array, spec: LossSpec) -> jax.Array:
    """The sum over all ranks, or those of a node, of which each gets the rows that it stores: half
    the bytes of an all-reduce. Of the copy of a node, with the dimension of nodes."""
    width = dhead_Dv.shape[1] * spec.mesh.shape[TENSOR]
    axes = axes_of(_gradient_spec((len(dhead_Dv), width), spec)[0])
    if axes:
        dhead_Dv = lax.psum_scatter(dhead_Dv, axes, scatter_dimension=0, tiled=True)
    summed = _SUM_AXES if spec.nodes is None else spec.nodes.inner
    dhead_Dv = lax.psum(dhead_Dv, tuple(axis for axis in summed if axis not in axes))
    return dhead_Dv if spec.nodes is None else dhead_Dv[None]


def _chunk_loss(normed_cD, head_Dv, values_c, spec: LossSpec, with_gradients: bool):
    """The loss of a chunk of this rank's tokens: (sums over the chunks of all tensor ranks,
    losses_c and, with gradients, dnormed_cD of this rank's tokens, dhead_Dv)."""
    num_own = len(normed_cD)
    # One gather for the forward and the gradient of the chunk. From here on c counts the tokens of
    # all tensor ranks.
    normed_cD, (targets_c, weights_c, teacher) = jax.tree.map(
        lambda x: lax.all_gather(x, TENSOR, axis=0, tiled=True), (normed_cD, values_c)
    )
    logits_cv = _logits(normed_cD, head_Dv, spec)
    if teacher is not None:
        losses_of, targets_c = _distillation, teacher
    else:
        losses_of = _cross_entropy if spec.token_loss is None else _custom_loss
    losses, dlogits = losses_of(logits_cv, targets_c, weights_c, spec)
    sums = weighted_sums(losses, weights_c)
    first = lax.axis_index(TENSOR) * num_own
    own_losses_c = lax.dynamic_slice_in_dim(losses.cross_entropy, first, num_own)
    if not with_gradients:
        return sums, own_losses_c
    dlogits_cv = (dlogits() / spec.temperature if spec.temperature != 1 else dlogits()).astype(
        normed_cD.dtype
    )
    dnormed_cD = jnp.einsum("cv,Dv->cD", dlogits_cv, head_Dv, preferred_element_type=jnp.float32)
    dnormed_cD = lax.psum_scatter(dnormed_cD, TENSOR, scatter_dimension=0, tiled=True).astype(
        normed_cD.dtype
    )
    with jax.named_scope(scopes.HEAD_GRADIENT):
        dhead_Dv = jnp.einsum(
            "cD,cv->Dv", normed_cD, dlogits_cv, preferred_element_type=jnp.float32
        )
    return sums, own_losses_c, dnormed_cD, dhead_Dv


def _cross_entropy(logits_cv, targets_c, weights_c, spec: LossSpec):
    """(what `weighted_sums` sums, a function that returns d(objective)/d(logits)), of cross entropy
    with z-loss. The normalizer, the target logit and, if spec.with_entropy, the entropy are over the
    whole vocabulary, from the columns of each rank.
    """
    is_target_cv = _columns(logits_cv.shape[1]) == targets_c[:, None]
    max_c, sum_exp_c = _sum_exp(logits_cv)
    parts = [sum_exp_c, jnp.where(is_target_cv, logits_cv, 0.0).sum(axis=1)]
    if spec.with_entropy:  # columns of padding are -inf
        shifted_cv = logits_cv - max_c[:, None]
        exp_cv = jnp.exp(shifted_cv)
        parts.append(jnp.where(exp_cv > 0, exp_cv * shifted_cv, 0.0).sum(axis=1))
    sum_exp_c, target_logit_c, *mean = lax.psum(jnp.stack(parts), TENSOR)  # one collective for all
    log_sum_c = jnp.log(sum_exp_c)
    log_z_c = max_c + log_sum_c
    losses_c = log_z_c - target_logit_c
    entropy_c = log_sum_c - mean[0] / sum_exp_c if mean else None

    @jax.named_scope(scopes.LOGITS)
    def dlogits() -> jax.Array:
        """Weight x (softmax x (1 + 2 z_loss log Z) - one_hot(target))."""
        softmax_cv = jnp.exp(logits_cv - log_z_c[:, None])
        dlogits_cv = softmax_cv * (1.0 + 2.0 * spec.z_loss * log_z_c)[:, None] - is_target_cv
        return weights_c[:, None] * dlogits_cv

    return LossSums(losses_c + spec.z_loss * log_z_c**2, losses_c, entropy_c), dlogits


def check_losses(losses: jax.Array, targets: jax.Array) -> None:
    """Raises UserError if a custom loss did not return one loss per token."""
    if jnp.shape(losses) != targets.shape:
        raise UserError(
            f"the loss returned shape {jnp.shape(losses)}: expected one loss per token, {targets.shape}"
        )


def _custom_loss(logits_cv, targets_c, weights_c, spec: LossSpec):
    """As `_cross_entropy`, of `spec.token_loss`. Every tensor rank gathers the logits and computes
    the same losses.
    """
    width = logits_cv.shape[1]
    logits_cV = lax.all_gather(logits_cv, TENSOR, axis=1, tiled=True)
    losses_c, vjp = jax.vjp(
        lambda logits: spec.token_loss(logits[:, : spec.vocab_size], targets_c), logits_cV
    )
    check_losses(losses_c, targets_c)

    def dlogits() -> jax.Array:
        (dlogits_cV,) = vjp(weights_c)
        return lax.dynamic_slice_in_dim(dlogits_cV, lax.axis_index(TENSOR) * width, width, axis=1)

    return LossSums(losses_c, losses_c), dlogits


def _distillation(logits_cv, teacher: Teacher, weights_c, spec: LossSpec):
    """As `_cross_entropy`, of the KL divergence from a teacher. What is not among its tokens is summed
    by itself, so that nothing cancels where the student gives it a small probability.
    """
    width = logits_cv.shape[1]
    rows_c1 = jnp.arange(len(logits_cv))[:, None]
    columns_ck = teacher.tokens - _columns(width)[0]
    is_here_ck = (columns_ck >= 0) & (columns_ck < width) & (teacher.tokens >= 0)
    places = rows_c1, jnp.where(is_here_ck, columns_ck, width)
    here_ck = logits_cv.at[places].get(mode="fill", fill_value=0)
    logits_ck = lax.psum(here_ck, TENSOR)
    others_cv = logits_cv.at[places].set(-jnp.inf, mode="drop")
    log_z_c, log_others_c = (_log_sum_exp(x) for x in (logits_cv, others_cv))
    probs_ck = jnp.where(teacher.tokens >= 0, jnp.exp(teacher.log_probs), 0)
    prob_others_c = jnp.maximum(1 - probs_ck.sum(1), 0)
    prob_others_c = jnp.where(log_others_c > -jnp.inf, prob_others_c, 0)
    log_others_c = jnp.where(prob_others_c > 0, log_others_c, log_z_c)
    gaps_ck = teacher.log_probs - logits_ck + log_z_c[:, None]
    losses_c = jnp.where(probs_ck > 0, probs_ck * gaps_ck, 0).sum(1)
    gaps_c = jnp.log(jnp.maximum(prob_others_c, 1e-37)) - log_others_c + log_z_c
    losses_c += prob_others_c * gaps_c

    def dlogits() -> jax.Array:
        scale_c = probs_ck.sum(1) + prob_others_c + 2 * spec.z_loss * log_z_c
        softmax_cv = jnp.exp(logits_cv - log_z_c[:, None]) * scale_c[:, None]
        targets_cv = jnp.exp(others_cv - log_others_c[:, None]) * prob_others_c[:, None]
        dlogits_cv = (softmax_cv - targets_cv).at[places].add(-probs_ck, mode="drop")
        return weights_c[:, None] * dlogits_cv

    return LossSums(losses_c + spec.z_loss * log_z_c**2, losses_c), dlogits


def _log_sum_exp(logits_cv: jax.Array) -> jax.Array:
    """Over the columns of all tensor ranks; -inf if all are."""
    max_c, sum_exp_c = _sum_exp(logits_cv)
    return max_c + jnp.log(lax.psum(sum_exp_c, TENSOR))


def _sum_exp(logits_cv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit of a token on all tensor ranks, or a finite number if all are -inf, and the sum
    of exp(logit - largest) over the columns of this rank.

    On GPUs, one kernel reads the logits once.
    """
    own_max_c, sum_c = lax.platform_dependent(logits_cv, cpu=_two_passes, default=_one_pass)
    max_c = lax.pmax(own_max_c, TENSOR)
    return max_c, sum_c * jnp.exp(own_max_c - max_c)


def _two_passes(logits_cv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `_one_pass`, in loops that CPUs vectorize."""
    max_c = logits_cv.max(axis=1, initial=_lowest(logits_cv.dtype))
    return max_c, jnp.exp(logits_cv - max_c[:, None]).sum(axis=1)


def _one_pass(logits_cv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logits, and the sums of exp(logit - largest), which are scaled whenever a larger
    one is found (Milakov and Gimelshein 2018, arXiv:1805.02867)."""

    def add(a, b):
        largest = jnp.maximum(a[0], b[0])
        scale = jnp.exp(jnp.minimum(a[0], b[0]) - largest)  # one exponential for both
        return largest, jnp.where(a[0] >= b[0], a[1] + b[1] * scale, a[1] * scale + b[1])

    first = _lowest(logits_cv.dtype), jnp.zeros((), logits_cv.dtype)
    return lax.reduce((logits_cv, jnp.ones_like(logits_cv)), first, add, (1,))


def _lowest(dtype) -> jax.Array:
    """A finite number: -inf - -inf is NaN."""
    return jnp.array(jnp.finfo(dtype).min, dtype)


@jax.named_scope(scopes.LOGITS)
def _logits(x_cD: jax.Array, head_Dv: jax.Array, spec: LossSpec) -> jax.Array:
    """float32 logits of this rank's columns; -inf in the columns of vocabulary padding."""
    logits_cv = jnp.einsum("cD,Dv->cv", x_cD, head_Dv, preferred_element_type=jnp.float32)
    if spec.temperature != 1:
        logits_cv /= spec.temperature
    return jnp.where(_columns(head_Dv.shape[1]) < spec.vocab_size, logits_cv, -jnp.inf)


def _columns(width: int) -> jax.Array:
    """Token ids of this rank's columns."""
    return lax.axis_index(TENSOR) * width + jnp.arange(width)


class ExpertSums(NamedTuple):
    """The sums over the microbatches of a step; float32. L counts layers with experts."""

    balance_loss: jax.Array
    router_z_loss: jax.Array
    counts_LE: jax.Array  # assignments to each expert, exact up to 2^24


class ExpertMetrics(NamedTuple):
    """The balance of a step, float32. L counts layers with experts."""

    # without its coefficient; the number of experts per token if all have equal loads
    balance_loss: jax.Array
    # without its coefficient: mean of the squared log of the router's normalizer
    router_z_loss: jax.Array
    load_LE: jax.Array  # assignments of each expert, divided by the mean of the layer


def expert_sums(
    sums: dict[str, jax.Array], segment_ids: jax.Array, train: TrainConfig
) -> ExpertSums:
    """The losses of a microbatch.

    Args:
      sums: of the layers, as `models.kinds.experts` returns them, [L, ...].
      segment_ids: of the microbatch; 0 is padding.
    """
    counts_LE = sums["expert_counts"]
    probs_LE = sums["expert_probs"]
    num_layers, num_experts = counts_LE.shape
    num_tokens = jnp.maximum((segment_ids > 0).sum(dtype=jnp.float32), 1)
    fractions = counts_LE / num_tokens
    means = probs_LE / num_tokens / num_layers
    if train.balance_loss_over == "layers":
        fractions = fractions.mean(0)
        means = means.sum(0)
    return ExpertSums(
        balance_loss=num_experts * (fractions * means).sum(),
        router_z_loss=sums["router_z"].mean() / num_tokens,
        counts_LE=counts_LE,
    )


def weighted_loss(sums: ExpertSums, train: TrainConfig) -> jax.Array:
    """What the losses of a microbatch add to the mean loss."""
    return train.balance_loss * sums.balance_loss + train.router_z_loss * sums.router_z_loss


def num_filled(segment_ids: jax.Array) -> jax.Array:
    """The number of microbatches that have tokens, at least 1; others add nothing to losses of experts. float32.

    Args:
      segment_ids: [gradient accumulation steps, sequences, tokens]; 0 is padding.
    """
    return jnp.maximum((segment_ids > 0).any((1, 2)).sum(dtype=jnp.float32), 1)


def expert_metrics(sums: ExpertSums, num_microbatches: jax.Array) -> ExpertMetrics:
    """The metrics of a step with tokens in `num_microbatches` microbatches."""
    mean_L1 = jnp.maximum(sums.counts_LE.mean(1, keepdims=True), 1 / sums.counts_LE.shape[1])
    return ExpertMetrics(
        balance_loss=sums.balance_loss / num_microbatches,
        router_z_loss=sums.router_z_loss / num_microbatches,
        load_LE=sums.counts_LE / mean_L1,
    )


def with_balanced_biases(
    params: dict, counts_LE: jax.Array, is_finite: jax.Array, model: ModelConfig, train: TrainConfig
) -> dict:
    """The parameters with the biases of the choice after a step (DeepSeek V3, arXiv:2412.19437,
    section 2.1.2).

    Args:
      params: the trained parameters; frozen biases, which it does not have, do not change.
      counts_LE: the assignments of the step.
      is_finite: if False, the step is skipped.
    """
    with_experts = model.layers_with_experts
    change_LE = train.balance_bias_rate * jnp.sign(counts_LE.mean(1, keepdims=True) - counts_LE)
    change_LE = jnp.where(is_finite, change_LE, 0)
    changes = {}
    for stack, layers in model.layer_stacks.items():
        if layers[0] in with_experts:
            rows = jnp.array([with_experts.index(layer) for layer in layers])
            changes[*stack, "mlp", "choice_bias"] = change_LE[rows]

    def added(path, x: jax.Array) -> jax.Array:
        change = changes.get(tuple(key.key for key in path))
        return x if change is None else x + change

    return jax.tree.map_with_path(added, params)
