"""How often each computation runs in one run of the program: what is in a loop runs once for each round."""

import re
from collections import Counter

from jaxlc.hlo.parser import Instruction, Program


def executions(program: Program) -> Counter[str]:
    """Times each computation runs, by name. Of a conditional every branch counts: no more often than this.

    Raises:
      ValueError: a loop whose number of rounds the text does not tell.
    """
    times = Counter({program.entry.name: 1})
    for computation in reversed(list(program)):  # callers before callees
        for instruction in computation:
            rounds = trip_count(program, instruction) if instruction.opcode == "while" else 1
            for callee in instruction.called:
                times[callee] += rounds * times[computation.name]
    return times


def trip_count(program: Program, loop: Instruction) -> int:
    """Rounds of a `while` instruction: the compiler's own note, or the constant that its condition compares with."""
    known = loop.backend_config.get("known_trip_count")
    if known:
        return int(known["n"])
    (condition,) = re.findall(r"%?([\w.$-]+)", loop.attributes["condition"])
    constants, is_below = [], False
    for name in (condition, *(name for each in program.computations[condition] for name in each.called)):
        for instruction in program.computations[name]:
            if instruction.opcode == "constant" and instruction.arguments.lstrip("-").isdigit():
                constants.append(int(instruction.arguments))
            is_below |= instruction.attributes.get("direction") == "LT"
    if len(constants) != 1 or not is_below:
        raise ValueError(f"the number of rounds of loop %{loop.name} is not known")
    return constants[0]  # jax.lax.scan and fori_loop count from 0 by 1
