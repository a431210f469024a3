"""The optimizer's update: of everything at once, or streamed where part of the state rests in host memory.

Streamed, a scan over layers fetches one layer's weights, gradients and moments, updates them and writes them back to
where they were, so that no more than a layer of what rests on the host is ever on the device; what is in no layer
(embedding, head, final norm) follows, one after the other. After ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840),
but that the arithmetic stays on the device. An array's home is in its type: `jax.typeof(x).memory_space`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxlc.core import scopes
from jaxlc.train.state import DEVICE, is_on_host, memory_kind_of, put


class ParamsAndOptState(NamedTuple):
    """What an update makes new: all of it, or the part of one entry of the parameters' dictionary."""

    params: dict
    opt_state: optax.OptState


@jax.named_scope(scopes.GRADIENT_NORM)
def gradient_norm(gradients: dict, dims: dict, scale: jax.Array) -> jax.Array:
    """Of `scale` times the gradients: the root of the sum of all squares, float32."""

    def squares(_, gradients):
        return optax.tree.norm(jax.tree.map(lambda g: g * scale, gradients), squared=True)

    if not is_on_host(gradients):
        return jnp.sqrt(squares(None, gradients))
    sums = [
        _stream(squares, dims[name], jnp.zeros(_num_layers(dims[name], part)), part).sum()
        for name, part in gradients.items()
    ]
    return jnp.sqrt(sum(sums))


@jax.named_scope(scopes.ACCUMULATE_GRADIENTS)
def add(gradients: dict, others: dict, dims: dict) -> dict:
    """Their sum, in the memory of `gradients`."""

    def add_part(a, b):
        return jax.tree.map(jnp.add, a, b)

    if not is_on_host(gradients):
        return add_part(gradients, others)
    return {name: _stream(add_part, dims[name], part, others[name]) for name, part in gradients.items()}


@jax.named_scope(scopes.OPTIMIZER)
def update(
    make_optimizer: Callable[[dict], optax.GradientTransformationExtraArgs],
    dims: dict,
    weights: ParamsAndOptState,
    gradients: dict,
    *,
    scale: jax.Array,
    grad_norm: jax.Array,
    is_finite: jax.Array,
) -> ParamsAndOptState:
    """The weights after a step with `scale` times the gradients; those before it where `is_finite` is False.

    Args:
      make_optimizer: given the dims of all parameters or of a part of them, the optimizer of these.
      grad_norm: of all gradients, scaled, for clipping.
    """

    def update_part(dims):
        optimizer = make_optimizer(dims)

        def run(old: ParamsAndOptState, gradients) -> ParamsAndOptState:
            gradients = jax.tree.map(lambda g: g * scale, gradients)
            updates, opt_state = optimizer.update(gradients, old.opt_state, old.params, grad_norm=grad_norm)
            new = ParamsAndOptState(optax.apply_updates(old.params, updates), opt_state)
            return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new, old)

        return run

    if not is_on_host(weights):
        return update_part(dims)(weights, gradients)
    parts = {}
    # Layers first: the others' counts of updates are the new ones.
    for name in sorted(weights.params, key=lambda name: _is_stacked(dims[name]), reverse=True):
        part = ParamsAndOptState(weights.params[name], _of_part(weights.opt_state, name))
        parts[name] = _stream(update_part(dims[name]), dims[name], part, gradients[name])
    return _joined(weights, parts)


def _stream(function: Callable, dims, results, *operands):
    """`function(results, *operands)`, in the memory of `results`: of whole arrays, or of one layer after the other.

    Arrays come to the function on the device. Layers are written in place; scalars among `results` stay as they are
    there, since all layers have them in common.
    """
    if not _is_stacked(dims):
        results, operands = lax.optimization_barrier((results, operands))
        made = function(*jax.tree.map(_fetched, (results, *operands)))
        return jax.tree.map(lambda old, new: put(new, memory_kind_of(old)), results, made)

    def run_layer(results, layer):
        @jax.named_scope(scopes.HOST_STATE)
        def fetch(x):
            return _fetched(lax.dynamic_index_in_dim(x, layer, keepdims=False)) if x.ndim else x

        @jax.named_scope(scopes.HOST_STATE)
        def write(stack, new):
            if not stack.ndim:
                return stack
            return lax.dynamic_update_index_in_dim(stack, put(new, memory_kind_of(stack)), layer, 0)

        made = function(*jax.tree.map(fetch, (results, *operands)))
        return jax.tree.map(write, results, made), None

    return lax.scan(run_layer, results, jnp.arange(_num_layers(dims, operands)))[0]


def _is_stacked(dims) -> bool:
    return _first(dims)[0] == "layers"


def _num_layers(dims, part) -> tuple[int, ...] | int:
    """L of stacked parameters; () of others, the shape of one number."""
    return jax.tree.leaves(part)[0].shape[0] if _is_stacked(dims) else ()


def _first(dims) -> tuple[str, ...]:
    return jax.tree.leaves(dims, is_leaf=lambda x: isinstance(x, tuple))[0]


def _of_part(opt_state: optax.OptState, name: str) -> optax.OptState:
    """The optimizer's state for one entry of the parameters: moments are dictionaries as the parameters are."""
    return jax.tree.map(lambda x: x[name] if isinstance(x, dict) else x, opt_state, is_leaf=_is_dict)


def _joined(whole: ParamsAndOptState, parts: dict[str, ParamsAndOptState]) -> ParamsAndOptState:
    """The opposite of taking parts; what is no dictionary is the last part's."""

    def join(in_whole, *states):
        return dict(zip(parts, states)) if _is_dict(in_whole) else states[-1]

    opt_states = [part.opt_state for part in parts.values()]
    return ParamsAndOptState(
        params={name: part.params for name, part in parts.items()},
        opt_state=jax.tree.map(join, whole.opt_state, *opt_states, is_leaf=_is_dict),
    )


def _is_dict(x) -> bool:
    return isinstance(x, dict)


def _fetched(x: jax.Array) -> jax.Array:
    return put(x, DEVICE)
