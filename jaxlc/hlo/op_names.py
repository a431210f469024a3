"""Scopes, pass and a readable label of an instruction, from its `op_name`.

An `op_name` is the path of a JAX operation:

    jit(_step)/while/body/closed_call/transpose(jvp())/while/body/checkpoint/attention/shard_map/core_attention/ppermute

Its components are of three kinds: scopes that this package sets (`jaxlc.core.scopes`), marks that JAX adds for its
own transformations and control flow, and, last, the primitive. Membership in a part of the model is read from scopes
only. Two things are known from JAX's marks alone, and all knowledge of these marks is in this module:

- the pass. `jax.checkpoint` marks what it recomputes with "rematted_computation"; the transpose of differentiation
  is marked "transpose(...)". A scope could not tell: the same Python code is traced once for all three passes.
- which components carry no information for a reader (`_MARKS`).

Where XLA merges instructions it merges their names too: "prefix/(path:path:path)".
"""

import re
from typing import Literal

from jaxlc.core.scopes import (
    CORE_ATTENTION,
    FIRST_RING_STEPS,
    MORE_DOCUMENTS,
    RECURRENCE,
    RING_STEP,
    SCOPES,
    SHARED_PREFIX,
    SLIDING_WINDOW,
)

Pass = Literal["forward", "recomputation", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "recomputation", "backward")

_RECOMPUTED, _TRANSPOSED = "rematted_computation", "transpose("
_TRANSFORMED = re.compile(r"(?:transpose|jvp|vmap)\((.*)\)$")  # not jit(...), which contains the name of a function
_MERGED = re.compile(r"(?:(.*)/)?\((.*:.*)\)$")
_MARKS = re.compile(
    r"(jit\(\w+\)|while|body|cond|branch_\d+_fun|closed_call|eval_jaxpr|checkpoint|rematted_computation|shard_map|)$"
)
_OPERATIONS = {  # JAX's name of a primitive -> a plainer one
    "psum": "sum over ranks",
    "scatter-add": "scatter-add",
    "broadcast_in_dim": "zeros",
    "dynamic_update_slice": "update in place",
    "sharding_constraint": "resharded",
    "optimization_barrier": "copy",
    "convert_element_type": "cast",
    "dot_general": "matrix product",
    "pallas_call": "kernel",
}


def components(op_name: str) -> tuple[str, ...]:
    """The parts of one path, without JAX's transformations around them: "jvp(loss)" is "loss"."""
    return tuple(_untransformed(part) for part in op_name.split("/"))


def is_in_attention(op_name: str) -> bool:
    """Whether an instruction belongs to attention's kernels and exchanges (scope `core_attention`).

    A merged instruction belongs to them if all its parts do: XLA merges the all-gather of segment ids with those of
    weights.
    """
    return all(CORE_ATTENTION in components(path) for path in _paths(op_name))


def is_in_token_mixing(op_name: str) -> bool:
    """As `is_in_attention`, or to the recurrence of linear attention, convolutions included."""
    mixing = {CORE_ATTENTION, *RECURRENCE}
    return all(mixing & set(components(path)) for path in _paths(op_name))


def has_window(op_name: str) -> bool:
    """Whether an instruction belongs to attention with a sliding window, exchanges included."""
    return any(SLIDING_WINDOW in components(path) for path in _paths(op_name))


def is_in_ring_step(op_name: str) -> bool:
    """Whether an instruction belongs to attention over the KV block of another rank."""
    return any(RING_STEP in components(path) for path in _paths(op_name))


def is_over_prefix(op_name: str) -> bool:
    """Whether an instruction belongs to attention of branches to a shared prefix."""
    return any(SHARED_PREFIX in components(path) for path in _paths(op_name))


def innermost_scope(op_name: str) -> str:
    """The last scope of an instruction, "" if it has none; a merged instruction has that of its first path."""
    scopes = [part for part in components(_paths(op_name)[0]) if part in SCOPES]
    return scopes[-1] if scopes else ""


def is_data_dependent(op_name: str) -> bool:
    """Whether the number of executions depends on the documents of a packed sequence."""
    return any(MORE_DOCUMENTS in components(path) for path in _paths(op_name))


def is_in_first_ring_steps(op_name: str) -> bool:
    """Whether an instruction belongs to a ring whose later steps no document needs."""
    return any(FIRST_RING_STEPS in components(path) for path in _paths(op_name))


def pass_of(op_name: str) -> Pass:
    """The pass of an instruction, from JAX's own marks; see the head of this module."""
    if _RECOMPUTED in op_name:
        return "recomputation"
    return "backward" if _TRANSPOSED in op_name else "forward"


def label(op_name: str) -> str:
    """A short description for people: "embedding, backward: scatter-add", "loss/logits, forward: matrix product".

    Names the scopes, the pass and the operation. Without a scope it names the components that are not JAX's marks. A
    merged instruction is described by its first path. The name of an argument is returned as it is.
    """
    path = _paths(op_name)[0].replace("\\'", "'")
    if "/" not in path:
        return path
    *parts, operation = components(path)
    names = [part for part in parts if part in SCOPES]
    if not names and operation == "dynamic_update_slice" and "while" in parts:
        return f"layers, {pass_of(path)}: saved activations"  # `jax.lax.scan` stacks what its rounds save
    names = names or [part for part in parts if not _MARKS.match(part)] or ["step"]
    return f"{'/'.join(names)}, {pass_of(path)}: {_OPERATIONS.get(operation, operation)}"


def _untransformed(part: str) -> str:
    while match := _TRANSFORMED.match(part):
        part = match[1]
    return part


def _paths(op_name: str) -> list[str]:
    """The paths of a merged name, or the one there is."""
    merged = _MERGED.match(op_name)
    if merged is None:
        return [op_name]
    return ["/".join(filter(None, (merged[1], path))) for path in merged[2].split(":")]
