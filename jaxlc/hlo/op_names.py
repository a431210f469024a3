"""Which part of a training step an instruction belongs to, from the path of its JAX operation."""

import re
from typing import Literal

Pass = Literal["forward", "recomputation", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "recomputation", "backward")

# The loop over layers, and in it `shard_map`: the loss has a shard_map too, and the step a loop over microbatches, but
# only attention has the one inside the other, below the mark of differentiation.
_ATTENTION = re.compile(r"\bjvp\([^/]*/(?:.*/)?while/body/(?:.*/)?shard_map/")


def is_in_attention(op_name: str) -> bool:
    """Whether the instruction comes from what the layers of a training step run inside attention's `shard_map`."""
    return bool(_ATTENTION.search(op_name))


def pass_of(op_name: str) -> Pass:
    """jax.checkpoint marks what it computes again; of the rest, `transpose(` is what differentiating adds."""
    if "rematted_computation" in op_name:
        return "recomputation"
    return "backward" if "transpose(" in op_name else "forward"
