"""Final norm and cross entropy over a long sequence and a large vocabulary, one chunk of tokens at a time.

At a million tokens the logits of Llama 3 would take 538 GB, and the normed hidden states 8 GiB. Each rank loops over
chunks of its tokens: it norms the chunk, gathers it over tensor, multiplies by its shard of the head, and reduces (max,
sum of exponentials, target logit) over tensor (Megatron-LM's vocabulary-parallel loss, Shoeybi et al. 2019, section 3).
The gradient of the chunk is computed in the same iteration, so the backward pass recomputes nothing and the head is
read once. It overwrites the chunk of x, so only one array of full sequence length exists.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.config import Config
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.core.errors import UserError
from jaxlc.models.chunks import over_chunks
from jaxlc.models.norms import rms_norm
from jaxlc.sharding.nodes import Nodes
from jaxlc.sharding.rules import axes_of, copy_spec, storage_spec
from jaxlc.step.losses.loss_chunk import loss_chunk_tokens

_TOKENS = (BATCH_AXES, (CONTEXT, TENSOR))  # the last two dimensions of targets and weights
_HEAD = PartitionSpec(None, TENSOR)
_HEAD_DIMS = ("model", "vocab")  # the dimensions of head_DV, as `sharding.rules` names them
_SUM_AXES = (*BATCH_AXES, CONTEXT)

# `(logits float32 [tokens, vocab_size], targets int32 [tokens]) -> losses float32 [tokens]`, differentiable. It is
# called for one chunk of tokens at a time, so the loss of a token depends on its own logits and target only.
TokenLoss = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The static arguments of `loss_sums` and `token_losses`; hashable."""

    mesh: Mesh
    vocab_size: int  # columns of the head from this index on are padding
    chunk_tokens: int  # tokens per device whose logits exist at the same time
    z_loss: float  # weight of log(Z)^2 (PaLM, section 5)
    norm_epsilon: float
    token_loss: TokenLoss | None = None  # None: cross entropy
    temperature: float = 1.0  # logits are divided by it
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
        """The arguments for `config` on `mesh`; norm_epsilon is used only with a scale of the final norm."""
        return cls(
            mesh=mesh,
            vocab_size=config.model.vocab_size,
            chunk_tokens=loss_chunk_tokens(config, mesh),
            z_loss=config.train.z_loss,
            norm_epsilon=norm_epsilon,
            token_loss=token_loss,
            nodes=nodes,
        )

    def for_head(self, head_DV: jax.Array) -> "LossSpec":
        """The same without nodes, unless the head is of the copy of a node."""
        return self if head_DV.ndim > len(_HEAD_DIMS) else dataclasses.replace(self, nodes=None)

    @property
    def mesh_in_use(self) -> Mesh:
        """The mesh of `shard_map`."""
        return self.mesh if self.nodes is None else self.nodes.mesh

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """The axes of `mesh_in_use` that split the tokens, without tensor."""
        return _SUM_AXES if self.nodes is None else self.nodes.axes(_SUM_AXES)


class LossSums(NamedTuple):
    objective: jax.Array  # float32: sum of weight x (loss + z_loss log(Z)^2); it is differentiated
    cross_entropy: jax.Array  # float32: sum of weight x loss, in nats for cross entropy; the loss that is reported


class _ChunkCarry(NamedTuple):
    """The carry of the loop over the chunks of one rank."""

    losses_t: jax.Array  # float32
    x_tD: jax.Array  # with gradients: the processed chunks hold dx_tD
    dscale_D: jax.Array | None  # float32, as dhead_Dv; None if it is not differentiated
    dhead_Dv: jax.Array | None  # the gradient from this rank's tokens


def token_losses(
    x_BTD: jax.Array, scale_D: jax.Array | None, head_DV: jax.Array, targets_BT: jax.Array, spec: LossSpec
) -> jax.Array:
    """Loss of each token, float32 of the targets' shape; not differentiable."""
    weights_BT = jnp.ones(targets_BT.shape, jnp.float32)
    return _over_ranks(x_BTD, scale_D, head_DV, targets_BT, weights_BT, spec, None)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def loss_sums(
    x_BTD: jax.Array,
    scale_D: jax.Array | None,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    spec: LossSpec,
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
    """
    return _over_ranks(x_BTD, scale_D, head_DV, targets_BT, weights_BT, spec, None)[0]


class _Differentiated(NamedTuple):
    """Which parameters have a gradient, in addition to x: not those that are frozen."""

    scale: bool
    head: bool


def _forward_rule(x_BTD, scale_D, head_DV, targets_BT, weights_BT, spec):
    """The arguments but the last are `CustomVJPPrimal`s, which know whether they are differentiated."""
    differentiated = _Differentiated(scale=scale_D is not None and scale_D.perturbed, head=head_DV.perturbed)
    primals = (None if x is None else x.value for x in (x_BTD, scale_D, head_DV, targets_BT, weights_BT))
    sums, _, *gradients = _over_ranks(*primals, spec, differentiated)
    return sums, gradients


@jax.named_scope(scopes.LOSS)
def _backward_rule(_spec, gradients, cotangents: LossSums):
    scaled = jax.tree.map(lambda gradient: (cotangents.objective * gradient).astype(gradient.dtype), gradients)
    return *scaled, None, None


loss_sums.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _over_ranks(
    x_BTD, scale_D, head_DV, targets_BT, weights_BT, spec: LossSpec, differentiated: _Differentiated | None
):
    """(sums, token losses, and unless `differentiated` is None dx_BTD, dscale_D, dhead_DV, None if it is frozen)."""
    spec = spec.for_head(head_DV)
    local = functools.partial(_local, spec=spec, differentiated=differentiated)
    tokens = (*(None,) * (targets_BT.ndim - 2), *_TOKENS)
    tokens, hidden, everywhere = PartitionSpec(*tokens), PartitionSpec(*tokens, None), PartitionSpec()
    out_specs = (LossSums(everywhere, everywhere), tokens)
    if differentiated is not None:
        out_specs = (*out_specs, hidden, everywhere)
    head, head_gradient = _HEAD, PartitionSpec(*_gradient_spec(head_DV.shape[-2:], spec))
    if spec.nodes is not None:
        out_specs, hidden, tokens = jax.tree.map(spec.nodes.spec, (out_specs, hidden, tokens))
        head, head_gradient = (PartitionSpec(spec.nodes.outer, *part) for part in (head, head_gradient))
    if differentiated is not None:
        out_specs = (*out_specs, head_gradient)
    in_specs = (hidden, everywhere, head, tokens, tokens)
    mapped = jax.shard_map(local, mesh=spec.mesh_in_use, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped(x_BTD, scale_D, head_DV, targets_BT, weights_BT)


def _gradient_spec(shape: tuple[int, ...], spec: LossSpec) -> PartitionSpec:
    """The sharding of dhead_DV: as it is stored, or as in the copy of a node."""
    if spec.nodes is None:
        return storage_spec(_HEAD_DIMS, shape, spec.mesh)
    return copy_spec(_HEAD_DIMS, shape, spec.nodes)


@jax.named_scope(scopes.LOSS)
def _local(x_btD, scale_D, head_Dv, targets_bt, weights_bt, *, spec: LossSpec, differentiated: _Differentiated | None):
    """`_over_ranks` on one rank; the sums are those over all ranks."""
    if spec.nodes is not None:
        head_Dv = head_Dv[0]
    x_tD, targets_t, weights_t = x_btD.reshape(-1, x_btD.shape[-1]), targets_bt.reshape(-1), weights_bt.reshape(-1)
    with_scale, with_head = differentiated or (False, False)
    gradients = (
        jnp.zeros(x.shape, jnp.float32) if with_gradient else None
        for x, with_gradient in ((scale_D, with_scale), (head_Dv, with_head))
    )
    carry = _ChunkCarry(jnp.zeros(x_tD.shape[:1], jnp.float32), x_tD, *gradients)

    def process_chunk(carry: _ChunkCarry, start, size: int):
        x_cD, targets_c, weights_c = (
            lax.dynamic_slice_in_dim(x, start, size) for x in (carry.x_tD, targets_t, weights_t)
        )
        normed_cD, norm_vjp = jax.vjp(functools.partial(_norm, spec=spec), x_cD, scale_D)
        sums, losses_c, *gradients = _chunk_loss(normed_cD, head_Dv, targets_c, weights_c, spec, differentiated)
        carry = carry._replace(losses_t=lax.dynamic_update_slice_in_dim(carry.losses_t, losses_c, start, 0))
        if differentiated is None:
            return carry, sums
        dnormed_cD, dhead_Dv = gradients
        dx_cD, dscale_D = norm_vjp(dnormed_cD)
        return carry._replace(
            x_tD=lax.dynamic_update_slice_in_dim(carry.x_tD, dx_cD, start, 0),
            dscale_D=carry.dscale_D + dscale_D if with_scale else None,
            dhead_Dv=carry.dhead_Dv + dhead_Dv if with_head else None,
        ), sums

    chunk_tokens = max(1, spec.chunk_tokens // spec.mesh.shape[TENSOR])  # before the gather over tensor
    carry, sums = over_chunks(process_chunk, carry, len(x_tD), chunk_tokens)
    sums = jax.tree.map(lambda per_chunk: lax.psum(per_chunk.sum(), spec.sum_axes), sums)
    losses_bt = carry.losses_t.reshape(targets_bt.shape)
    if differentiated is None:
        return sums, losses_bt
    dscale_D = lax.psum(carry.dscale_D, (*spec.sum_axes, TENSOR))  # each tensor rank norms its own tokens
    dhead_dv = None
    if with_head:
        with jax.named_scope(scopes.HEAD_GRADIENT):
            dhead_dv = _sum_to_storage(carry.dhead_Dv, spec).astype(head_Dv.dtype)
    return sums, losses_bt, carry.x_tD.reshape(x_btD.shape), dscale_D, dhead_dv


def _sum_to_storage(dhead_Dv: jax.Array, spec: LossSpec) -> jax.Array:
    """The sum over all ranks, or those of a node, of which each gets the rows that it stores: half the bytes of an
    all-reduce. Of the copy of a node, with the dimension of nodes."""
    width = dhead_Dv.shape[1] * spec.mesh.shape[TENSOR]
    axes = axes_of(_gradient_spec((len(dhead_Dv), width), spec)[0])
    if axes:
        dhead_Dv = lax.psum_scatter(dhead_Dv, axes, scatter_dimension=0, tiled=True)
    summed = _SUM_AXES if spec.nodes is None else spec.nodes.inner
    dhead_Dv = lax.psum(dhead_Dv, tuple(axis for axis in summed if axis not in axes))
    return dhead_Dv if spec.nodes is None else dhead_Dv[None]


def _chunk_loss(normed_cD, head_Dv, targets_c, weights_c, spec: LossSpec, differentiated: _Differentiated | None):
    """The loss of a chunk of this rank's tokens: (sums over the chunks of all tensor ranks, losses_c and, unless
    `differentiated` is None, dnormed_cD of this rank's tokens, dhead_Dv, None if it is frozen)."""
    num_own = len(targets_c)
    # One gather for the forward and the gradient of the chunk. From here on c counts the tokens of all tensor ranks.
    normed_cD, targets_c, weights_c = (
        lax.all_gather(x, TENSOR, axis=0, tiled=True) for x in (normed_cD, targets_c, weights_c)
    )
    logits_cv = _logits(normed_cD, head_Dv, spec)
    losses_of = _cross_entropy if spec.token_loss is None else _custom_loss
    sums, losses_c, dlogits = losses_of(logits_cv, targets_c, weights_c, spec)
    own_losses_c = lax.dynamic_slice_in_dim(losses_c, lax.axis_index(TENSOR) * num_own, num_own)
    if differentiated is None:
        return sums, own_losses_c
    dlogits_cv = (dlogits() / spec.temperature if spec.temperature != 1 else dlogits()).astype(normed_cD.dtype)
    dnormed_cD = jnp.einsum("cv,Dv->cD", dlogits_cv, head_Dv, preferred_element_type=jnp.float32)
    dnormed_cD = lax.psum_scatter(dnormed_cD, TENSOR, scatter_dimension=0, tiled=True).astype(normed_cD.dtype)
    dhead_Dv = None
    if differentiated.head:
        with jax.named_scope(scopes.HEAD_GRADIENT):
            dhead_Dv = jnp.einsum("cD,cv->Dv", normed_cD, dlogits_cv, preferred_element_type=jnp.float32)
    return sums, own_losses_c, dnormed_cD, dhead_Dv


def _norm(x_cD: jax.Array, scale_D: jax.Array | None, spec: LossSpec) -> jax.Array:
    return x_cD if scale_D is None else rms_norm(x_cD, scale_D, epsilon=spec.norm_epsilon)


def _cross_entropy(logits_cv, targets_c, weights_c, spec: LossSpec):
    """(sums, losses_c, a function that returns dlogits_cv), of cross entropy with z-loss."""
    log_z_c, target_logit_c = _reduce_vocabulary(logits_cv, targets_c)
    losses_c = log_z_c - target_logit_c
    sums = LossSums(
        objective=(weights_c * (losses_c + spec.z_loss * log_z_c**2)).sum(),
        cross_entropy=(weights_c * losses_c).sum(),
    )
    return sums, losses_c, lambda: _dlogits(logits_cv, log_z_c, targets_c, weights_c, spec.z_loss)


def check_losses(losses: jax.Array, targets: jax.Array) -> None:
    """Raises UserError if a custom loss did not return one loss per token."""
    if jnp.shape(losses) != targets.shape:
        raise UserError(f"the loss returned shape {jnp.shape(losses)}: expected one loss per token, {targets.shape}")


def _custom_loss(logits_cv, targets_c, weights_c, spec: LossSpec):
    """As `_cross_entropy`, of `spec.token_loss`. Every tensor rank gathers the logits and computes the same losses."""
    width = logits_cv.shape[1]
    logits_cV = lax.all_gather(logits_cv, TENSOR, axis=1, tiled=True)
    losses_c, vjp = jax.vjp(lambda logits: spec.token_loss(logits[:, : spec.vocab_size], targets_c), logits_cV)
    check_losses(losses_c, targets_c)
    total = (weights_c * losses_c).sum()

    def dlogits() -> jax.Array:
        (dlogits_cV,) = vjp(weights_c)
        return lax.dynamic_slice_in_dim(dlogits_cV, lax.axis_index(TENSOR) * width, width, axis=1)

    return LossSums(objective=total, cross_entropy=total), losses_c, dlogits


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


def _reduce_vocabulary(logits_cv: jax.Array, targets_c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log(Z) and the target logit over the whole vocabulary, from the columns of each rank."""
    max_c = lax.pmax(logits_cv.max(axis=1), TENSOR)
    is_target_cv = _columns(logits_cv.shape[1]) == targets_c[:, None]
    sums_2c = jnp.stack(
        [
            jnp.exp(logits_cv - max_c[:, None]).sum(axis=1),
            jnp.where(is_target_cv, logits_cv, 0.0).sum(axis=1),
        ]
    )
    sum_exp_c, target_logit_c = lax.psum(sums_2c, TENSOR)  # one collective for both
    return max_c + jnp.log(sum_exp_c), target_logit_c


@jax.named_scope(scopes.LOGITS)
def _dlogits(logits_cv, log_z_c, targets_c, weights_c, z_loss: float) -> jax.Array:
    """d(objective)/d(logits): weight x (softmax x (1 + 2 z_loss log Z) - one_hot(target))."""
    softmax_cv = jnp.exp(logits_cv - log_z_c[:, None])
    is_target_cv = _columns(logits_cv.shape[1]) == targets_c[:, None]
    dlogits_cv = softmax_cv * (1.0 + 2.0 * z_loss * log_z_c)[:, None] - is_target_cv
    return weights_c[:, None] * dlogits_cv
