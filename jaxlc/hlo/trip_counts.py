"""How often each computation runs in one run of the program, from the trip counts of loops."""

import re
from collections import Counter

from jaxlc.hlo.op_names import is_data_dependent
from jaxlc.hlo.parser import Instruction, Program

_KNOWN = "known_trip_count"


def count_executions(program: Program) -> Counter[str]:
    """How often each computation runs, by name. Every branch of a conditional counts, so this is an upper bound.

    Raises:
      ValueError: the trip count of a loop is unknown.
    """
    counts = Counter({program.entry.name: 1})
    for computation in reversed(list(program)):  # callers before callees
        for instruction in computation:
            rounds = trip_count(program, instruction) if instruction.opcode == "while" else 1
            for callee in instruction.called:
                counts[callee] += rounds * counts[computation.name]
    return counts


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
