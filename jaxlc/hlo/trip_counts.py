"""How often each computation runs in one run of the program, from the trip counts of loops."""

import re
from collections import Counter

from jaxlc.hlo.op_names import is_data_dependent, is_in_first_ring_steps
from jaxlc.hlo.parser import Computation, Instruction, Program

_KNOWN = "known_trip_count"


def count_executions(program: Program, *, skips_ring_steps: bool = False) -> Counter[str]:
    """How often each computation runs, by name. Every branch of a conditional counts, so this is an upper bound.

    Except for a ring that may skip steps: one of its branches counts.

    Args:
      skips_ring_steps: the branch that skips steps counts, instead of the one with all steps.

    Raises:
      ValueError: the trip count of a loop is unknown.
    """
    counts = Counter({program.entry.name: 1})
    for computation in reversed(list(program)):  # callers before callees
        for instruction in computation:
            rounds = trip_count(program, instruction) if instruction.opcode == "while" else 1
            for callee in called(program, instruction, skips_ring_steps):
                counts[callee] += rounds * counts[computation.name]
    return counts


def called(program: Program, instruction: Instruction, skips_ring_steps: bool) -> list[str]:
    """The computations that `instruction` runs, by name; see `count_executions`."""
    if instruction.opcode != "conditional":
        return list(instruction.called)
    skips = {name: _skips_ring_steps(program.computations[name]) for name in instruction.called}
    return [name for name in skips if not any(skips.values()) or skips[name] == skips_ring_steps]


def _skips_ring_steps(branch: Computation) -> bool:
    return any(is_in_first_ring_steps(instruction.op_name) for instruction in branch)


def trip_count(program: Program, loop: Instruction) -> int:
    """Trip count of a `while`: the compiler's annotation, or the constant to which its condition compares.

    0 for the loop over further packed documents, whose trip count depends on the data: with one document it does not
    run.

    Raises:
      ValueError: none of these.
    """
    if is_data_dependent(loop.op_name):
        return 0
    if not is_host_controlled(loop):
        return int(loop.backend_config[_KNOWN]["n"])
    (condition,) = re.findall(r"%?([\w.$-]+)", loop.attributes["condition"])
    constants: list[int] = []
    is_below = False
    callees = (name for instruction in program.computations[condition] for name in instruction.called)
    for name in (condition, *callees):
        for instruction in program.computations[name]:
            if instruction.opcode == "constant" and instruction.arguments.lstrip("-").isdigit():
                constants.append(int(instruction.arguments))
            is_below |= instruction.attributes.get("direction") == "LT"
    if len(constants) != 1 or not is_below:
        raise ValueError(f"unknown trip count of loop %{loop.name}")
    return constants[0]  # jax.lax.scan and fori_loop count from 0 by 1


def is_host_controlled(loop: Instruction) -> bool:
    """Whether the compiler does not know the trip count, so that the host waits for the condition of each round."""
    return _KNOWN not in loop.backend_config
