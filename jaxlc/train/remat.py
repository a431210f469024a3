"""What layers keep for their backward, what waits in host memory, and what is computed again (`jax.checkpoint`).

Tensors are named where they are made: attention/ring.py and its siblings name `attention_out` and `attention_lse`,
models/layers.py the others (`config.schema.TENSOR_NAMES`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.config import MemoryConfig

_KEPT_BY = {
    "full": (),  # only the layer's input
    # The ring is the dearest thing to run again, and its output one of the smallest.
    "attention": ("attention_out", "attention_lse"),
    "matmuls": ("attention_out", "attention_lse"),  # and all products: recompute only what is cheap
}
_GROUP_INPUT = "residual"


class Remat(NamedTuple):
    """How the decoder runs its layers."""

    of_layer: Callable[[Callable], Callable]  # wraps the function of one layer
    of_group: Callable[[Callable], Callable]  # wraps the function of `layers_per_group` layers, if that is not 1
    layers_per_group: int


def make_remat(memory: MemoryConfig) -> Remat:
    """With groups, a group keeps its input alone; when it is recomputed its layers keep what `memory` says, without
    host memory, for they are in the backward already. So attention runs no more often than with single layers and
    `full`, whatever `memory` keeps, and layers are recomputed from the group's input once."""
    if memory.remat == "none":
        return Remat(lambda layer: layer, lambda group: group, 1)
    if memory.layers_per_remat_group == 1:
        return Remat(_checkpoint(memory, memory.save, memory.offload), lambda group: group, 1)
    of_layer = _checkpoint(memory, (*memory.save, *memory.offload), ())
    of_group = _group_checkpoint(_GROUP_INPUT in memory.offload)
    return Remat(of_layer, of_group, memory.layers_per_remat_group)


def keeps_attention(memory: MemoryConfig) -> bool:
    """Whether attention's out and lse are there in the backward, on the device or the host."""
    return {"attention_out", "attention_lse"} <= {*_KEPT_BY[memory.remat], *memory.save, *memory.offload}


def _checkpoint(memory: MemoryConfig, keep: tuple[str, ...], offload: tuple[str, ...]) -> Callable:
    kept = {*_KEPT_BY[memory.remat], *keep} - set(offload)
    policy = _policy(kept, offload)
    if memory.remat == "matmuls":
        policy = jax.checkpoint_policies.save_from_both_policies(
            policy, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        )
    # prevent_cse guards against a compiler that undoes the recomputation; inside a scan nothing can.
    return lambda layer: jax.checkpoint(layer, policy=policy, prevent_cse=False)


def _group_checkpoint(offloads_input: bool) -> Callable:
    # A name of its own: layers name their inputs too, and of those a group keeps none.
    name = "group_residual"
    policy = _policy((), (name,) if offloads_input else ())

    def of_group(group):
        def named(x_BTD, *operands):
            return group(checkpoint_name(x_BTD, name), *operands)

        return jax.checkpoint(named, policy=policy, prevent_cse=False)

    return of_group


def _policy(kept, offloaded):
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*kept)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(kept),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
