"""What a layer keeps for its backward, by name. The rest is computed again (`jax.checkpoint`).

Names of tensors are given where they are made: attention/ring.py names `attention_out` and `attention_lse`,
models/layers.py the others.
"""

from collections.abc import Callable

import jax

_ATTENTION = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,  # only the layer's input
    "attention": _ATTENTION,  # the ring is the dearest thing to run again, and its output one of the smallest
    "matmuls": jax.checkpoint_policies.save_from_both_policies(  # recompute only what is cheap
        _ATTENTION, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


def make_remat(name: str) -> Callable[[Callable], Callable]:
    """The wrapper for a layer's function; `name` is a value of config.memory.remat."""
    if name == "none":
        return lambda layer: layer
    # prevent_cse guards against a compiler that undoes the recomputation; inside a scan nothing can.
    return lambda layer: jax.checkpoint(layer, policy=_POLICIES[name], prevent_cse=False)
