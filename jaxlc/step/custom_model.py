"""Custom models: their interface, and their loss and gradients in the training step."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlc.config import Config
from jaxlc.core import TENSOR, Unsupported, UserError
from jaxlc.step.batch import Batch, token_weights
from jaxlc.step.loss import (
    LossSpec,
    LossSums,
    TokenLoss,
    check_losses,
    loss_sums,
    sums_and_losses,
    weighted_sums,
)
from jaxlc.step.objective import accumulate

NATURAL = "natural"
ZIGZAG = "zigzag"


class Model(Protocol):
    """A model that `jaxlc.train.run` and `jaxlc.train.build_step` train instead of the decoder of config.model.

    Two attributes are optional:

    token_order: "natural" (the default), or "zigzag" for a model that calls `jaxlc.attend` on tokens in zigzag order.
    dims: the tree of the parameters with a tuple of dimension names per leaf, as in `jaxlc.sharding.rules`. By default
      the largest dimension of each matrix is sharded over fsdp and context, vectors are replicated, and weight decay
      applies to matrices only.
    """

    def init(self, key: jax.Array) -> Any:
        """The parameters of step 0, a pytree of float32 arrays; called under `jit`."""

    def apply(
        self, params: Any, batch: Batch, mesh: Mesh
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """The output for one microbatch; called under `jit`.

        Args:
          batch: arrays [B, T], B sharded over data and fsdp, T over context, in `token_order`.
          mesh: the mesh of the run, for `jaxlc.attend`.
        Returns:
          Final hidden states [B, T, D] and the output head [D, V], of which the loss computes logits in chunks; or
          logits [B, T, V], which need B x T x V x 4 bytes.
        """


@dataclass(frozen=True, kw_only=True)
class CustomObjective:
    """The loss of `model` on `mesh`, with the interface of `objective.Objective`."""

    config: Config
    mesh: Mesh
    model: Model
    token_loss: TokenLoss | None = None

    @cached_property
    def dims(self):
        """The parameter tree with a tuple of dimension names per leaf."""
        declared = getattr(self.model, "dims", None)
        if declared is not None:
            return declared
        return jax.tree.map(_default_dims, jax.eval_shape(self.init_params, jax.random.key(0)))

    @property
    def frozen(self) -> frozenset[str]:
        """All parameters are trained; see `check_supported`."""
        return frozenset()

    @property
    def token_order(self) -> str:
        """The order of tokens in the arrays of a batch."""
        order = getattr(self.model, "token_order", NATURAL)
        if order not in (NATURAL, ZIGZAG):
            raise UserError(
                f"invalid token_order={order!r} of the model: expected {NATURAL!r} or {ZIGZAG!r}"
            )
        return order

    def init_params(self, key: jax.Array):
        """The parameters of step 0."""
        return self.model.init(key)

    def loss_and_grads(self, params, batch: Batch, histories: dict | None = None):
        """See `Objective.loss_and_grads`."""

        def objective(params, _histories, part: Batch):
            hidden_BTD, head_DV = self.features(params, part)
            weights_BT = token_weights(part)
            if head_DV is None:
                sums = weighted_sums(self._losses_of_logits(hidden_BTD, part.targets), weights_BT)
            else:
                values = self._padded_head(head_DV), part.targets, weights_BT, self._loss_spec
                sums = loss_sums(hidden_BTD, None, *values)
            return sums.objective, sums.cross_entropy

        return *accumulate(objective, params, batch, self.dims, histories), None

    def token_losses(self, params, batch: Batch) -> jax.Array:
        """Loss of each token, float32 [B, T]; for evaluation."""
        hidden_BTD, head_DV = self.features(params, batch)
        if head_DV is None:
            return self._losses_of_logits(hidden_BTD, batch.targets).cross_entropy
        weights_BT = jnp.ones(batch.targets.shape, jnp.float32)
        values = self._padded_head(head_DV), batch.targets, weights_BT, self._loss_spec
        return sums_and_losses(hidden_BTD, None, *values)[1]

    def features(self, params, batch: Batch) -> tuple[jax.Array, jax.Array | None]:
        """The model's hidden states [B, T, D] and output head [D, V]; or its logits [B, T, V] and
        None.

        Raises:
          UserError: the shapes do not match the `Model` protocol.
        """
        output = self.model.apply(params, batch, self.mesh)
        vocab_size = self.config.model.vocab_size
        arrays = output if isinstance(output, tuple) else (output,)
        first = arrays[0]
        last = arrays[-1]
        is_valid = len(arrays) <= 2 and first.ndim == 3 and first.shape[:2] == batch.tokens.shape
        if (
            not is_valid
            or last.shape[-1] != vocab_size
            or (len(arrays) == 2 and last.shape[:-1] != first.shape[2:])
        ):
            raise UserError(
                f"the model returned {' and '.join(str(x.shape) for x in arrays)}: expected logits"
                f" {(*batch.tokens.shape, vocab_size)} (config.model.vocab_size={vocab_size}), or hidden states"
                f" {(*batch.tokens.shape, 'D')} and an output head ('D', {vocab_size})"
            )
        return first, last if len(arrays) == 2 else None

    @cached_property
    def _loss_spec(self) -> LossSpec:
        return LossSpec.from_config(self.config, self.mesh, self.token_loss)

    def _losses_of_logits(self, logits_BTV: jax.Array, targets_BT: jax.Array) -> LossSums:
        """What `weighted_sums` sums, float32 [B, T]."""
        logits_BTV = logits_BTV.astype(jnp.float32)
        if self.token_loss is not None:
            losses_N = self.token_loss(
                logits_BTV.reshape(-1, logits_BTV.shape[-1]), targets_BT.reshape(-1)
            )
            check_losses(losses_N, targets_BT.reshape(-1))
            losses_BT = losses_N.reshape(targets_BT.shape)
            return LossSums(losses_BT, losses_BT)
        log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
        target_logits_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
        losses_BT = log_z_BT - target_logits_BT
        return LossSums(losses_BT + self.config.train.z_loss * log_z_BT**2, losses_BT)

    def _padded_head(self, head_DV: jax.Array) -> jax.Array:
        """The head with zero columns up to a multiple of tensor, which `loss_sums` requires and
        masks.
        """
        padding = -head_DV.shape[1] % self.mesh.shape[TENSOR]
        return jnp.pad(head_DV, ((0, 0), (0, padding)))


def check_methods(argument: str, value, methods: tuple[str, ...]) -> None:
    """Raises UserError if the `value` of an optional argument lacks one of the methods."""
    if value is not None and not all(callable(getattr(value, method, None)) for method in methods):
        raise UserError(
            f"invalid {argument} {value!r}: expected an object with methods {' and '.join(methods)}"
        )


def check_supported(
    config: Config, *, has_model: bool, has_loss: bool, has_optimizer: bool
) -> None:
    """Checks that the settings support a custom model, loss or optimizer.

    Raises:
      UserError: a setting does not support it; the message names the setting.
    """
    memory = config.memory
    on_host = [name for name in ("parameters", "optimizer") if vars(memory)[name] == "host"]
    if (has_model or has_optimizer) and on_host:
        custom = "model" if has_model else "optimizer"
        raise Unsupported(
            f"config.memory.{on_host[0]}='host' is unsupported with a custom {custom}: the layer-wise update in host"
            " memory needs the decoder of config.model and AdamW; use 'device'"
        )
    if has_model and (config.lora.rank or config.train.trainable or config.train.frozen):
        raise Unsupported(
            "config.lora.rank, config.train.trainable and config.train.frozen are unsupported with a custom model: they"
            " select parameters of the decoder of config.model; freeze parameters with an optax optimizer of your own"
        )
    if has_model and config.precision.compute == "fp8":
        raise Unsupported(
            "config.precision.compute='fp8' is unsupported with a custom model: it selects matrix products of the"
            " decoder of config.model; use 'bf16' or 'fp32'"
        )
    if has_model and not has_optimizer and config.optimizer.name == "muon":
        raise Unsupported(
            "config.optimizer.name='muon' is unsupported with a custom model: it selects matrices of the decoder of"
            " config.model; use 'adamw', or pass an optax optimizer"
        )
    if has_model and memory.node_copy_devices:
        raise Unsupported(
            f"config.memory.node_copy_devices={memory.node_copy_devices} is unsupported with a custom model, which"
            " gathers weights itself; use 0"
        )
    for name, unset in (("teacher_top_k", 0), ("loss", "")):
        value = vars(config.posttrain)[name]
        if (has_model or has_loss) and value:
            raise Unsupported(
                f"config.posttrain.{name}={value!r} is unsupported with a custom model or loss: it selects a loss of"
                f" the decoder of config.model; set it to {unset!r}"
            )
    if has_loss and config.train.z_loss:
        raise UserError(
            f"config.train.z_loss={config.train.z_loss:g} has no effect with a custom loss: set it to 0, and add the"
            " term to your loss"
        )


def _default_dims(leaf: jax.ShapeDtypeStruct) -> tuple[str, ...]:
    """Dimension names of a parameter without declared ones: the largest dimension of a matrix is
    sharded.
    """
    if len(leaf.shape) < 2:
        return ("norm",) * len(leaf.shape)
    largest = max(range(len(leaf.shape)), key=leaf.shape.__getitem__)
    return tuple("model" if dim == largest else "unsharded" for dim in range(len(leaf.shape)))
