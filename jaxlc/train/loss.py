"""Cross entropy over a long sequence and a large vocabulary: logits exist for one chunk of tokens at a time.

At a million tokens the logits of Llama 3 would take 538 GB. Here each rank walks over its tokens in chunks: gathers
the chunk over tensor, multiplies by its share of the vocabulary, and reduces (max, sum of exponentials, target
logit) over tensor (Megatron-LM's vocabulary-parallel loss, Shoeybi et al. 2019, section 3). The chunk's gradient is
taken in the same visit, so the backward recomputes nothing and the head is read once.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR

_TOKENS = PartitionSpec(BATCH_AXES, (CONTEXT, TENSOR))
_HIDDEN = PartitionSpec(BATCH_AXES, (CONTEXT, TENSOR), None)
_HEAD = PartitionSpec(None, TENSOR)
_SUM_AXES = (*BATCH_AXES, CONTEXT)


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    mesh: Mesh
    vocab_size: int  # columns of the head beyond it are padding
    chunk_tokens: int  # tokens per device whose logits exist at one time
    z_loss: float  # weight of log(Z)^2 (PaLM, section 5)


class LossSums(NamedTuple):
    objective: jax.Array  # float32: sum of weight x (cross entropy + z_loss log(Z)^2); this one has the gradient
    cross_entropy: jax.Array  # float32: sum of weight x cross entropy, in nats; for people to read


def token_losses(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, spec: LossSpec) -> jax.Array:
    """Cross entropy of each token in nats, float32 [B, T]; not differentiable."""
    weights_BT = jnp.ones(targets_BT.shape, jnp.float32)
    return _over_ranks(spec, with_gradient=False)(x_BTD, head_DV, targets_BT, weights_BT)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def loss_sums(
    x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, spec: LossSpec
) -> LossSums:
    """Weighted sums of the loss over all ranks; the caller divides once by the weights of all microbatches.

    Args:
      x_BTD: final hidden states in the compute dtype, layout order.
      head_DV: output head in the compute dtype, V padded to a multiple of tensor.
      targets_BT: int32. weights_BT: float32, 0 where there is nothing to predict.
    """
    return _over_ranks(spec, with_gradient=False)(x_BTD, head_DV, targets_BT, weights_BT)[0]


def _forward_rule(x_BTD, head_DV, targets_BT, weights_BT, spec):
    sums, _, dx_BTD, dhead_DV = _over_ranks(spec, with_gradient=True)(x_BTD, head_DV, targets_BT, weights_BT)
    return sums, (dx_BTD, dhead_DV)


def _backward_rule(_spec, residuals, cotangents: LossSums):
    dx_BTD, dhead_DV = residuals
    scale = cotangents.objective
    return (scale * dx_BTD).astype(dx_BTD.dtype), (scale * dhead_DV).astype(dhead_DV.dtype), None, None


loss_sums.defvjp(_forward_rule, _backward_rule)


def _over_ranks(spec: LossSpec, with_gradient: bool):
    local = functools.partial(_local, spec=spec, with_gradient=with_gradient)
    out_specs = (LossSums(PartitionSpec(), PartitionSpec()), _TOKENS)
    if with_gradient:
        out_specs = (*out_specs, _HIDDEN, _HEAD)
    in_specs = (_HIDDEN, _HEAD, _TOKENS, _TOKENS)
    return jax.shard_map(local, mesh=spec.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _local(x_btD, head_Dv, targets_bt, weights_bt, *, spec: LossSpec, with_gradient: bool):
    """One rank's tokens, chunk by chunk: (sums over all ranks, token losses, and with_gradient dx_btD, dhead_Dv)."""
    batch, num_tokens, model_dim = x_btD.shape
    tensor = spec.mesh.shape[TENSOR]
    chunk = min(batch * num_tokens, max(1, spec.chunk_tokens // tensor))  # before the gather over tensor
    chunks = tuple(_chunked(x, chunk) for x in (x_btD, targets_bt, weights_bt))  # (number of chunks, chunk, ...)

    def visit(dhead_Dv, operands):
        # One gather serves the forward and the gradient of this chunk.
        x_cD, targets_c, weights_c = (lax.all_gather(x, TENSOR, axis=0, tiled=True) for x in operands)
        logits_cv = _logits(x_cD, head_Dv, spec.vocab_size)
        log_z_c, target_logit_c = _reduce_vocabulary(logits_cv, targets_c)
        losses_c = log_z_c - target_logit_c
        sums = LossSums(
            objective=(weights_c * (losses_c + spec.z_loss * log_z_c**2)).sum(),
            cross_entropy=(weights_c * losses_c).sum(),
        )
        own_losses = _own_share(losses_c, chunk)
        if not with_gradient:
            return dhead_Dv, (sums, own_losses)
        dlogits_cv = _dlogits(logits_cv, log_z_c, targets_c, weights_c, spec.z_loss).astype(x_cD.dtype)
        dx_cD = jnp.einsum("cv,Dv->cD", dlogits_cv, head_Dv, preferred_element_type=jnp.float32)
        dx_cD = lax.psum_scatter(dx_cD, TENSOR, scatter_dimension=0, tiled=True).astype(x_cD.dtype)
        dhead_Dv += jnp.einsum("cD,cv->Dv", x_cD, dlogits_cv, preferred_element_type=jnp.float32)
        return dhead_Dv, (sums, own_losses, dx_cD)

    dhead_Dv = jnp.zeros(head_Dv.shape if with_gradient else (), jnp.float32)
    dhead_Dv, (sums, losses, *dx) = lax.scan(visit, dhead_Dv, chunks)
    sums = jax.tree.map(lambda per_chunk: lax.psum(per_chunk.sum(), _SUM_AXES), sums)

    def joined(x, shape):
        return x.reshape(-1, *shape[2:])[: batch * num_tokens].reshape(shape)

    losses_bt = joined(losses, targets_bt.shape)
    if not with_gradient:
        return sums, losses_bt
    return sums, losses_bt, joined(dx[0], x_btD.shape), lax.psum(dhead_Dv, _SUM_AXES).astype(head_Dv.dtype)


def _chunked(x_bt: jax.Array, chunk: int) -> jax.Array:
    """Flattens rows and tokens and cuts them into chunks; what is missing at the end is 0, so weighs 0."""
    flat = x_bt.reshape(-1, *x_bt.shape[2:])
    padding = [(0, -len(flat) % chunk)] + [(0, 0)] * (flat.ndim - 1)
    return jnp.pad(flat, padding).reshape(-1, chunk, *flat.shape[1:])


def _logits(x_cD: jax.Array, head_Dv: jax.Array, vocab_size: int) -> jax.Array:
    """float32 logits of this rank's columns; -inf in the columns that pad the vocabulary."""
    logits_cv = jnp.einsum("cD,Dv->cv", x_cD, head_Dv, preferred_element_type=jnp.float32)
    return jnp.where(_columns(head_Dv.shape[1]) < vocab_size, logits_cv, -jnp.inf)


def _columns(width: int) -> jax.Array:
    """Vocabulary ids of this rank's columns."""
    return lax.axis_index(TENSOR) * width + jnp.arange(width)


def _reduce_vocabulary(logits_cv: jax.Array, targets_c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log(Z) and the target's logit over the whole vocabulary, from each rank's columns."""
    max_c = lax.pmax(logits_cv.max(axis=1), TENSOR)
    is_target_cv = _columns(logits_cv.shape[1]) == targets_c[:, None]
    sums_2c = jnp.stack([
        jnp.exp(logits_cv - max_c[:, None]).sum(axis=1),
        jnp.where(is_target_cv, logits_cv, 0.0).sum(axis=1),
    ])
    sum_exp_c, target_logit_c = lax.psum(sums_2c, TENSOR)  # one collective for both
    return max_c + jnp.log(sum_exp_c), target_logit_c


def _dlogits(logits_cv, log_z_c, targets_c, weights_c, z_loss: float) -> jax.Array:
    """d(objective)/d(logits): weight x (softmax x (1 + 2 z_loss log Z) - one_hot(target))."""
    softmax_cv = jnp.exp(logits_cv - log_z_c[:, None])
    is_target_cv = _columns(logits_cv.shape[1]) == targets_c[:, None]
    dlogits_cv = softmax_cv * (1.0 + 2.0 * z_loss * log_z_c)[:, None] - is_target_cv
    return weights_c[:, None] * dlogits_cv


def _own_share(x_c: jax.Array, chunk: int) -> jax.Array:
    """This rank's part of a chunk that was gathered over tensor."""
    return lax.dynamic_slice_in_dim(x_c, lax.axis_index(TENSOR) * chunk, chunk)
