"""Rematerialization: which activations are saved, offloaded to host memory, or recomputed
(`jax.checkpoint`).

Activations (`config.kinds.tensor_names`) are named where they are computed: `attention_out` and
`attention_lse` in attention/strategies/, `delta_states` in attention/state_passing.py, the rest in
models/. The experts of each token, a few bytes, are always saved: in a recomputation, a rounded
logit could choose others.
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.config import MemoryConfig
from jaxlc.models.contract import CHOICE
from jaxlc.models.layer_stack import Remat

_SAVED_BY = {
    "full": (CHOICE,),  # only the layer input
    # Attention is the most expensive part to recompute, and its output is one of the smallest
    # activations.
    "attention": ("attention_out", "attention_lse", "delta_states", CHOICE),
    # Also all matrix products with weights (`_checkpoint`): only cheap operations are recomputed.
    "matmuls": ("attention_out", "attention_lse", "delta_states", CHOICE),
}
_GROUP_INPUT = "residual"


def make_remat(memory: MemoryConfig, num_compiled: int = 1) -> Remat:
    """The rematerialization policy of config.memory, for a program with `num_compiled` layers
    (`ModelConfig.num_compiled_layers`).

    With groups of layers, a group saves only its input. When the backward pass recomputes the
    group, its layers save what `memory` selects, all on the device. So layers are recomputed from
    the group's input once, and attention runs as often as with single layers and remat "full",
    independent of what `memory` saves.
    """
    if memory.remat == "none":
        return Remat(lambda layer, in_loop=False: layer, lambda group: group, 1)
    # Whether a recomputation has to wait for the gradients of its results (`prevent_cse`). A scan
    # with one layer per iteration does not need it. If an iteration has several layers, XLA could
    # recompute all of them first. It could also merge recomputations with the forward pass, if the
    # scan has one iteration and is inlined.
    needs_barriers = num_compiled > 1
    if memory.layers_per_remat_group == 1:
        return Remat(
            _checkpoint(memory, memory.save, memory.offload, needs_barriers), lambda group: group, 1
        )
    wrap_layer = _checkpoint(memory, (*memory.save, *memory.offload), (), needs_barriers)
    wrap_group = _group_checkpoint(_GROUP_INPUT in memory.offload, needs_barriers)
    return Remat(wrap_layer, wrap_group, memory.layers_per_remat_group)


def saves_attention(memory: MemoryConfig) -> bool:
    """Whether attention_out and attention_lse are saved for the backward pass, on the device or the
    host.
    """
    return {"attention_out", "attention_lse"} <= {
        *_SAVED_BY[memory.remat],
        *memory.save,
        *memory.offload,
    }


def _checkpoint(
    memory: MemoryConfig, save: tuple[str, ...], offload: tuple[str, ...], needs_barriers: bool
) -> Callable:
    saved = {*_SAVED_BY[memory.remat], *save} - set(offload)
    policy = _policy(saved, offload)
    if memory.remat == "matmuls":
        policy = jax.checkpoint_policies.save_from_both_policies(
            policy, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        )

    def wrap_layer(layer: Callable, in_loop: bool = False) -> Callable:
        # Barriers would copy the float32 weights of the layer out of their stack.
        return jax.checkpoint(layer, policy=policy, prevent_cse=needs_barriers and not in_loop)

    return wrap_layer


def _group_checkpoint(offloads_input: bool, needs_barriers: bool) -> Callable:
    # Not "residual": every layer names its input that, and a group saves only its own.
    name = "group_residual"
    policy = _policy((CHOICE,), (name,) if offloads_input else ())

    def wrap_group(group):
        def named(x_BTD, *operands):
            return group(checkpoint_name(x_BTD, name), *operands)

        return jax.checkpoint(named, policy=policy, prevent_cse=needs_barriers)

    return wrap_group


def _policy(saved, offloaded):
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
