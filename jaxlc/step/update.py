"""The optimizer update with AdamW or Muon and their learning-rate schedules: of the whole state at
once, or streamed if part of the state is in host memory.

A streamed update is a scan over layers: it copies the weights, gradients and moments of one layer
to the device, updates them, and writes them back, so that at most one layer of the host state is on
the device. Parameters outside the layers (embedding, head, final norm) follow one by one. As in
ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840), but the arithmetic is done on the device. The
memory of an array is part of its type, `jax.typeof(x).memory_space`.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax.nnx.traversals import unflatten_mapping
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from jaxlc.config import OptimizerConfig
from jaxlc.core import scopes
from jaxlc.models.offloaded_layers import layer_of
from jaxlc.sharding.mesh import shard_map
from jaxlc.sharding.rules import axes_of, is_vector, storage_spec
from jaxlc.step.state import DEVICE, is_masked, is_on_host, memory_kind_of, to_memory_kind

_TINY = 1e-30  # added to the norm of a matrix


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns number of earlier updates -> learning rate: from schedule_start on a linear warm-up,
    then

    cosine    a cosine decay (Loshchilov and Hutter 2017), which would reach final_learning_rate_ratio x peak one step
              after the last step, as in transformers;
    linear    a linear decay to the same;
    wsd       the peak, then a linear decay over the last decay_steps (MiniCPM, Hu et al. 2024, section 4);
    constant  the peak.

    Args:
      steps: the length of the schedule, if config.schedule_steps is 0.
    """
    peak = config.learning_rate
    final = config.learning_rate * config.final_learning_rate_ratio
    after_warmup = max(1, (config.schedule_steps or steps) - config.warmup_steps)
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(
            peak, after_warmup, alpha=config.final_learning_rate_ratio
        )
    elif config.schedule == "linear":
        main = optax.linear_schedule(peak, final, after_warmup)
    elif config.schedule == "wsd":
        decay = optax.linear_schedule(peak, final, config.decay_steps)
        main = optax.join_schedules(
            [optax.constant_schedule(peak), decay], [after_warmup - config.decay_steps]
        )
    else:
        main = optax.constant_schedule(peak)
    # Without an initial learning rate, step 0 has peak / warmup_steps, not 0.
    initial = config.initial_learning_rate_ratio * peak
    first = initial + (peak - initial) / max(1, config.warmup_steps)
    warmup = optax.linear_schedule(first, peak, max(1, config.warmup_steps - 1))
    schedule = optax.join_schedules([warmup, main], [config.warmup_steps])
    if not config.schedule_start:
        return schedule
    # At least 0: with fp16, skipped steps of earlier stages do not count as updates.
    return lambda num_updates: schedule(jnp.maximum(num_updates - config.schedule_start, 0))


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, dims, mesh: Mesh | AbstractMesh
) -> optax.GradientTransformationExtraArgs:
    """Clipping by the global norm, then AdamW (Loshchilov and Hutter 2019), or for the matrices of
    layers Muon (`scale_by_muon`).

    `update` takes the global norm as `grad_norm`, so that it can be called on a part of the parameters, with the
    gradients and moments of that part.

    Args:
      dims: dimension names of the parameters, or of a part of them. They select the parameters with weight decay:
        matrices, and by setting embeddings, norm scales and biases.
      mesh: of the stored parameters.
    """

    def decays(names: tuple[str, ...]) -> bool:
        if is_vector(names):
            return config.decay_norms
        return config.decay_embeddings or names[0] != "vocab"

    def where(condition: Callable[[tuple[str, ...]], bool]) -> Any:
        return jax.tree.map(condition, dims, is_leaf=lambda x: isinstance(x, tuple))

    scales = [optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)]
    if config.name == "muon":
        others = where(lambda names: not is_layer_matrix(names))
        muon = optax.masked(scale_by_muon(config, dims, mesh), where(is_layer_matrix))
        scales = [muon, optax.masked(*scales, others)]
    optimizer = optax.chain(
        *scales,
        optax.add_decayed_weights(config.weight_decay, where(decays)),
        optax.scale_by_learning_rate(schedule),
    )
    if not config.max_grad_norm:
        return optax.with_extra_args_support(optimizer)
    return optax.chain(_clip_by_given_norm(config.max_grad_norm), optimizer)


def is_layer_matrix(names: tuple[str, ...]) -> bool:
    """Whether a parameter has the matrices of a projection, which Muon updates: not an embedding, an
    output head, a router, a convolution, or a vector.
    """
    is_other = is_vector(names) or "taps" in names or names[-1] == "experts"
    return names[0] == "layers" and not is_other


class MuonState(NamedTuple):
    momentum: Any  # the moving mean of the gradients


def scale_by_muon(
    config: OptimizerConfig, dims, mesh: Mesh | AbstractMesh
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): the orthogonalized
    Nesterov momentum of each matrix.

    The momentum and the scales are those of torch.optim.Muon: `original` is sqrt(max(1, outputs /
    inputs)), `match_rms_adamw` is 0.2 sqrt(max(outputs, inputs)) (Liu et al. 2025,
    arXiv:2502.16982, section 2.2).

    Args:
      dims: dimension names of the parameters; only those of `is_layer_matrix` are updated.
      mesh: of the stored parameters.
    """

    def init(params) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(gradients, state: MuonState, params=None):
        del params

        beta = config.momentum
        momentum = state.momentum
        momentum = jax.tree.map(lambda m, g: m + (1 - beta) * (g - m), momentum, gradients)
        directions = jax.tree.map(lambda g, m: g + beta * (m - g), gradients, momentum)
        updates = jax.tree.map(
            lambda x, names: x if is_masked(x) else _orthogonalized(x, names, config, mesh),
            directions,
            dims,
            is_leaf=is_masked,
        )
        return updates, MuonState(momentum)

    return optax.GradientTransformation(init, update)


def _orthogonalized(
    x: jax.Array, names: tuple[str, ...], config: OptimizerConfig, mesh: Mesh | AbstractMesh
) -> jax.Array:
    """The scaled orthogonalized matrices of a parameter, or of one of its layers.

    Ranks exchange parts of matrices for whole ones, so that each matrix is orthogonalized once.
    """
    names = names[-x.ndim :]
    num_batch_dims = sum(name in ("layers", "experts") for name in names)
    spec = storage_spec(names, x.shape, mesh)
    sharded = {dim: axes_of(entry) for dim, entry in enumerate(spec) if entry is not None}
    # over ranks that store the same values
    equal = tuple(a for a in mesh.axis_names if a not in sum(sharded.values(), ()))
    num_equal = math.prod(mesh.shape[axis] for axis in equal)

    def local(x):
        local_shape = x.shape
        shape = x.shape[num_batch_dims:]
        x = x.reshape(-1, *shape)
        num_matrices = len(x)
        x = jnp.pad(x, ((0, -num_matrices % mesh.size), *[(0, 0)] * len(shape)))
        for dim, axes in sharded.items():
            x = lax.all_to_all(x, axes, 0, 1 + dim - num_batch_dims, tiled=True)
        if num_equal > 1:
            x = x.reshape(num_equal, -1, *x.shape[1:])[lax.axis_index(equal)]
        x = _orthogonalized_matrices(x, names[num_batch_dims:], config)
        if num_equal > 1:
            x = lax.all_gather(x, equal, tiled=True)
        for dim, axes in reversed(sharded.items()):
            x = lax.all_to_all(x, axes, 1 + dim - num_batch_dims, 0, tiled=True)
        return x[:num_matrices].reshape(local_shape)

    return shard_map(local, mesh, spec, spec)(x)


def _orthogonalized_matrices(
    x: jax.Array, names: tuple[str, ...], config: OptimizerConfig
) -> jax.Array:
    """Whole matrices [matrices, ...]; `names`: the other dimensions, those of the inputs first."""
    heads = names.index("head_dim") if "head_dim" in names else 0
    whole = x
    if heads and config.muon_heads:
        whole = jnp.moveaxis(x, heads, 1).reshape(-1, *np.delete(x.shape[1:], heads - 1))
    num_input_dims = whole.ndim - 2 if names[1:2] == ("head_dim",) else 1
    num_inputs = math.prod(whole.shape[1 : 1 + num_input_dims])
    matrices = whole.reshape(len(whole), num_inputs, -1)
    inputs, outputs = matrices.shape[1:]
    scale = max(1, outputs / inputs) ** 0.5
    if config.muon_scale == "match_rms_adamw":
        scale = 0.2 * max(outputs, inputs) ** 0.5
    # Without a momentum, the transformation has no state.
    newton_schulz = optax.contrib.scale_by_muon(
        beta=0.0,
        nesterov=False,
        eps=_TINY,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2),
    )
    matrices, _ = newton_schulz.update(matrices, newton_schulz.init(matrices))
    whole = (scale * matrices).reshape(whole.shape)
    if heads and config.muon_heads:
        whole = jnp.moveaxis(whole.reshape(len(x), x.shape[heads], *whole.shape[1:]), 1, heads)
    return whole


@dataclass(frozen=True, kw_only=True)
class StepOptimizer:
    """The optimizer of a training step: config.optimizer, or a custom one."""

    config: OptimizerConfig
    schedule: optax.Schedule
    mesh: Mesh | AbstractMesh  # of the stored parameters
    custom: optax.GradientTransformation | None = None

    def of(self, dims) -> optax.GradientTransformationExtraArgs:
        """The optimizer of the parameters with these `dims`, which are all trainable ones or a part
        of them.
        """
        if self.custom is not None:
            return optax.with_extra_args_support(self.custom)
        return make_optimizer(self.config, self.schedule, dims, self.mesh)

    def learning_rate(self, opt_state: optax.OptState) -> jax.Array:
        """The learning rate of the next update, float32; NaN if a custom optimizer does not store
        it.
        """
        if self.custom is None:
            num_updates = optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]
            return jnp.float32(self.schedule(num_updates))  # skipped steps do not count
        # as optax.inject_hyperparams does
        return jnp.float32(optax.tree.get(opt_state, "learning_rate", jnp.nan))


def _clip_by_given_norm(max_grad_norm: float) -> optax.GradientTransformationExtraArgs:
    """optax.clip_by_global_norm (Pascanu et al. 2013) with the norm as an argument of `update`."""

    def update(gradients, state, params=None, *, grad_norm: jax.Array, **_):
        del params
        is_small = grad_norm < max_grad_norm
        return jax.tree.map(
            lambda g: jnp.where(is_small, g, g / grad_norm * max_grad_norm), gradients
        ), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


class ParamsAndOptState(NamedTuple):
    """What an update changes: of the whole model, or of one entry of the parameter dictionary."""

    params: dict
    opt_state: optax.OptState


@jax.named_scope(scopes.GRADIENT_NORM)
def gradient_norm(gradients: dict, dims: dict, scale: jax.Array) -> jax.Array:
    """The global norm of `scale` times the gradients, float32."""

    def squares(_, gradients):
        return optax.tree.norm(optax.tree.scale(scale, gradients), squared=True)

    if not is_on_host(gradients):
        return jnp.sqrt(squares(None, gradients))
    sums = []
    for path in _stacks(gradients, dims):
        part = _at(gradients, path)
        part_dims = _at(dims, path)
        sums.append(
            _stream(squares, part_dims, jnp.zeros(_num_layers(part_dims, part)), part).sum()
        )
    return jnp.sqrt(sum(sums))


@jax.named_scope(scopes.ACCUMULATE_GRADIENTS)
def add(gradients: dict, others: dict, dims: dict) -> dict:
    """The sum of both trees, in the memory of `gradients`."""

    add_part = functools.partial(jax.tree.map, jnp.add)
    if not is_on_host(gradients):
        return add_part(gradients, others)
    paths = _stacks(gradients, dims)
    return unflatten_mapping(
        {
            path: _stream(add_part, *(_at(tree, path) for tree in (dims, gradients, others)))
            for path in paths
        }
    )


@jax.named_scope(scopes.OPTIMIZER)
def update(
    make_optimizer: Callable[[dict], optax.GradientTransformationExtraArgs],
    dims: dict,
    old: ParamsAndOptState,
    gradients: dict,
    *,
    scale: jax.Array,
    grad_norm: jax.Array,
    is_finite: jax.Array,
) -> ParamsAndOptState:
    """Parameters and optimizer state after an update with `scale` times the gradients; `old` if `is_finite` is False.

    Args:
      make_optimizer: returns the optimizer of all parameters, or of a part of them, given their dims.
      grad_norm: global norm of the scaled gradients, for clipping.
    """

    def update_part(dims):
        optimizer = make_optimizer(dims)

        def run(old: ParamsAndOptState, gradients) -> ParamsAndOptState:
            gradients = optax.tree.scale(scale, gradients)
            updates, opt_state = optimizer.update(
                gradients, old.opt_state, old.params, grad_norm=grad_norm
            )
            new = ParamsAndOptState(optax.apply_updates(old.params, updates), opt_state)
            return optax.tree.where(is_finite, new, old)

        return run

    if not is_on_host(old):
        return update_part(dims)(old, gradients)
    parts: dict[tuple[str, ...], ParamsAndOptState] = {}
    # A streamed update does not write the optimizer's count, and all parts may be streamed: an update of no parameters
    # gives it.
    no_params = ParamsAndOptState({}, _of_part(old.opt_state, lambda moments: {}))
    shared = update_part({})(no_params, {}).opt_state
    paths = _stacks(old.params, dims)
    # layers first
    for path in sorted(paths, key=lambda path: _is_stacked(_at(dims, path)), reverse=True):
        of_part = functools.partial(_at, path=path)
        part = ParamsAndOptState(of_part(old.params), _of_part(old.opt_state, of_part))
        part_dims = of_part(dims)
        parts[path] = _stream(update_part(part_dims), part_dims, part, of_part(gradients))
    return _joined(old, parts, shared)


def _stream(function: Callable, dims, results, *operands):
    """`function(results, *operands)`, in the memory of `results`: on whole arrays, or layer by
    layer if stacked.

    The function gets its arrays on the device. Layers are updated in place; scalars among `results`
    are not written, since all layers share them.
    """
    if not _is_stacked(dims):
        results, operands = lax.optimization_barrier((results, operands))
        new_results = function(*jax.tree.map(_to_device, (results, *operands)))
        return jax.tree.map(
            lambda old, new: to_memory_kind(new, memory_kind_of(old)), results, new_results
        )

    def run_layer(layer, results):
        @jax.named_scope(scopes.HOST_STATE)
        def fetch(x):
            return _to_device(layer_of(x, layer)) if x.ndim else x

        @jax.named_scope(scopes.HOST_STATE)
        def write(stack, new):
            if not stack.ndim:
                return stack
            new = to_memory_kind(new, memory_kind_of(stack))[None]
            return lax.dynamic_update_slice_in_dim(
                stack, new, layer, 0, allow_negative_indices=False
            )

        new_results = function(*jax.tree.map(fetch, (results, *operands)))
        return jax.tree.map(write, results, new_results)

    # XLA compiles copies only if the index is the loop counter; see
    # `jaxlc.models.offloaded_layers`.
    return lax.fori_loop(0, _num_layers(dims, operands), run_layer, results)


def _stacks(params: dict, dims: dict) -> list[tuple[str, ...]]:
    """The paths of the parts that are streamed: the entries of the tree, or of an entry whose
    stacks, those of several kinds of layers, differ in their number of layers."""

    def paths(name: str) -> list[tuple[str, ...]]:
        is_one = (
            not _is_stacked(dims[name]) or len({len(x) for x in jax.tree.leaves(params[name])}) == 1
        )
        return [(name,)] if is_one else [(name, kind) for kind in params[name]]

    return [path for name in params for path in paths(name)]


def _at(tree: dict, path: tuple[str, ...]):
    """The entry of nested dictionaries at a path."""
    return functools.reduce(operator.getitem, path, tree)


def _is_stacked(dims) -> bool:
    return jax.tree.leaves(dims, is_leaf=lambda x: isinstance(x, tuple))[0][0] == "layers"


def _num_layers(dims, part) -> tuple[int, ...] | int:
    """L of stacked parameters; () of others, the shape of a scalar."""
    return jax.tree.leaves(part)[0].shape[0] if _is_stacked(dims) else ()


def _of_part(opt_state: optax.OptState, part_of: Callable[[dict], Any]) -> optax.OptState:
    """The optimizer state with a part of its moments, which are dictionaries with the keys of the
    parameters.
    """
    return jax.tree.map(lambda x: part_of(x) if _is_dict(x) else x, opt_state, is_leaf=_is_dict)


def _joined(
    whole: ParamsAndOptState,
    parts: dict[tuple[str, ...], ParamsAndOptState],
    shared: optax.OptState,
) -> ParamsAndOptState:
    """Joins parts of the parameters and of the optimizer state; other optimizer state comes from
    `shared`.
    """

    def join(in_whole, common, *states):
        return unflatten_mapping(dict(zip(parts, states))) if _is_dict(in_whole) else common

    opt_states = [part.opt_state for part in parts.values()]
    return ParamsAndOptState(
        params=unflatten_mapping({path: part.params for path, part in parts.items()}),
        opt_state=jax.tree.map(join, whole.opt_state, shared, *opt_states, is_leaf=_is_dict),
    )


def _is_dict(x) -> bool:
    return isinstance(x, dict)


def _to_device(x: jax.Array) -> jax.Array:
    return to_memory_kind(x, DEVICE)
