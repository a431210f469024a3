"""Memory kinds of a lowered program's arguments and results, which JAX drops where the GPUs are absent (AOT)."""

from collections.abc import Sequence

import jax
from jax.stages import Lowered
from jaxlib.mlir import ir

from jaxlc._jax_internals import kept_argument_indices
from jaxlc.step.state import HOST, PINNED_HOST
from jaxlc.step.step import TrainStep

_KIND, _ALIAS = "mhlo.memory_kind", "tf.aliasing_output"  # attributes of the lowered program's arguments and results


def place_state(step: TrainStep, lowered: Lowered) -> None:
    """Writes into the lowered `step` which arrays of the state are in host memory."""
    kinds = _kinds(step.memory_spaces)
    if any(kinds):
        others = [None] * len(jax.tree.leaves(step.abstract_batch))
        place_in_memory(lowered, kinds + others, kinds + [None] * (lowered.out_tree.num_leaves - len(kinds)))


def place_params(step: TrainStep, lowered: Lowered) -> None:
    """As `place_state`, for the lowered evaluation of `step`, or its log-probabilities."""
    kinds = _kinds(step.memory_spaces.params)
    others = [None] * (lowered.in_tree.num_leaves - len(kinds))
    place_in_memory(lowered, kinds + others, [None])


def _kinds(spaces) -> list[str | None]:
    return [PINNED_HOST if space is HOST else None for space in jax.tree.leaves(spaces)]


def place_in_memory(lowered: Lowered, arguments: Sequence[str | None], results: Sequence[str | None]) -> None:
    """Writes memory kinds into a lowered program, before `.compile()`, because JAX drops those of absent GPUs.

    Absent devices list no memories, so a sharding with memory_kind="pinned_host" has no effect, and the bytes would
    count as device memory. Donation of an argument to a result in another memory is removed. The function must not
    have been compiled before: JAX caches its executable, and does not notice that the program has changed.

    Args:
      arguments, results: for each leaf "pinned_host" or "device", or None to keep it as it is.
    """
    kept = kept_argument_indices(lowered)
    module = lowered.compiler_ir("stablehlo")
    (main,) = (operation for operation in module.body.operations if _is_main(operation))
    with module.context:
        result_attributes = [
            _with_kind(attributes, kind) for attributes, kind in zip(main.attributes["res_attrs"], results, strict=True)
        ]
        argument_attributes = [
            _with_kind(attributes, arguments[index])
            for attributes, index in zip(main.attributes["arg_attrs"], kept, strict=True)
        ]
        for named in argument_attributes:
            aliased_output = named.get(_ALIAS)
            if aliased_output is not None and _kind(named) != _kind(
                result_attributes[ir.IntegerAttr(aliased_output).value]
            ):
                del named[_ALIAS]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(named) for named in argument_attributes])
        main.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(named) for named in result_attributes])


def _is_main(operation) -> bool:
    return "sym_name" in operation.attributes and ir.StringAttr(operation.attributes["sym_name"]).value == "main"


def _with_kind(attributes, kind: str | None) -> dict:
    named = {attribute.name: attribute.attr for attribute in ir.DictAttr(attributes)}
    return named | ({_KIND: ir.StringAttr.get(kind)} if kind else {})


def _kind(named: dict) -> str:
    return ir.StringAttr(named[_KIND]).value if _KIND in named else "device"
