"""The only module that uses private JAX APIs.

Each function names the private API and the JAX versions on which it was checked; tests/test_jax_internals.py has one
canary test per function, which fails when a new JAX version changes that API. JAX is imported inside the functions, so
importing this module neither imports nor starts JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax.stages


def backends_are_initialized() -> bool:
    """Whether JAX has initialized its backends, after which environment variables and XLA_FLAGS have no effect.

    Does not initialize them itself; every public function that would answer this does.
    Private: `jax._src.xla_bridge.backends_are_initialized`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def kept_argument_indices(lowered: jax.stages.Lowered) -> list[int]:
    """The sorted indices of the flat arguments that the lowered program has; JAX drops the unused ones.

    Private: `Lowered._lowering.compile_args`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    return sorted(lowered._lowering.compile_args["kept_var_idx"])


def replace_argument_residuals(vjp: Callable, first: int, residuals: Sequence[Any]) -> None:
    """Replaces the residuals of `vjp` that are primal arguments `first` to the end, in place.

    `jax.vjp` stores a primal argument that the backward pass reads apart from the other residuals, recognized by the
    identity of the array. Replacing an argument with None keeps it out of the pytree `vjp`, and so out of what
    `lax.scan` stacks; it must be set again before `vjp` is called.

    Args:
      vjp: the function that `jax.vjp` returns.
      residuals: one per argument from `first` on, each None or of the structure of that argument.

    Private: `VJP.args_res`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    assert len(residuals) == len(vjp.args_res) - first
    vjp.args_res[first:] = residuals
