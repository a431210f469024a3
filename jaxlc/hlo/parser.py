"""The text of a compiled program (`compiled.as_text()`) as computations of instructions.

    HloModule jit_step, is_scheduled=true, ...
    %body (...) -> ... {
      %name = shape opcode(%operand, ...), attribute=value, calls=%computation, metadata={...}, backend_config={...}
      ...
    }
    ENTRY %main (...) -> ... {

A callee stands before its callers, and where the module is scheduled, lines stand in the order in which they run.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from jaxlc.hlo.shapes import Array, parse_shape

_COMMENT = re.compile(r"/\*index=\d+\*/")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.$-]+) = (.*)")
_NAME = re.compile(r"%([\w.$-]+)")
_CALLS = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation")


class Instruction:
    """One line of a computation. What costs time to read is read when asked for."""

    def __init__(self, name: str, shape: str, opcode: str, arguments: str, attributes: str):
        self.name, self.opcode = name, opcode
        self.arguments = arguments  # as written; of a constant, its value
        self._shape, self._attributes = shape, attributes

    def __repr__(self) -> str:
        return f"%{self.name} = {self.opcode}({self.arguments})"

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """What it makes; several where that is a tuple."""
        return parse_shape(self._shape)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of instructions of the same computation."""
        return tuple(_NAME.findall(self.arguments))

    @cached_property
    def attributes(self) -> dict[str, str]:
        return dict(part.split("=", 1) for part in _split(self._attributes) if "=" in part)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        return tuple(name for key in _CALLS for name in _NAME.findall(self.attributes.get(key, "")))

    @cached_property
    def op_name(self) -> str:
        """The path of its JAX operation, such as "jit(step)/transpose(jvp())/while/body/ppermute"; "" if unknown."""
        found = re.search(r'op_name="([^"]*)"', self.attributes.get("metadata", ""))
        return found[1] if found else ""

    @cached_property
    def backend_config(self) -> dict:
        """What the GPU compiler notes for itself; empty where it notes nothing, or not in JSON."""
        try:
            return json.loads(self.attributes.get("backend_config", "{}"))
        except json.JSONDecodeError:
            return {}


@dataclass(frozen=True, eq=False)
class Computation:
    name: str
    instructions: dict[str, Instruction]  # by name, in the program's order

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]


@dataclass(frozen=True, eq=False)
class Program:
    computations: dict[str, Computation]  # callees before callers
    entry: Computation
    is_scheduled: bool  # the order of instructions is the order in which they run

    def __iter__(self) -> Iterator[Computation]:
        return iter(self.computations.values())


def parse(text: str) -> Program:
    """Reads `compiled.as_text()`.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations, entry, inside = {}, None, None
    for line in text.splitlines():
        if inside is None:
            header = _COMPUTATION.match(line)
            if header:
                inside = computations[header[2]] = Computation(header[2], {})
                entry = inside if header[1] else entry
        elif line.startswith("}"):
            inside = None
        else:
            instruction = _instruction(line)
            inside.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("this is no text of a compiled program: it has no ENTRY computation")
    return Program(computations, entry, "is_scheduled=true" in text.partition("\n")[0])


def _instruction(line: str) -> Instruction:
    name, rest = _INSTRUCTION.match(_COMMENT.sub("", line)).groups()
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closing(rest, len(opcode))
    return Instruction(name, shape, opcode, rest[len(opcode) + 1 : end - 1], rest[end:])


_BRACKETS_AND_QUOTES = re.compile(r'[(){}\[\],]|"(?:[^"\\]|\\.)*"')


def _closing(text: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`."""
    depth = 0
    for match in _BRACKETS_AND_QUOTES.finditer(text, start):
        depth += (match[0] in "({[") - (match[0] in ")}]")
        if depth == 0:
            return match.end()
    raise ValueError(f"brackets do not close: {text}")


def _split(text: str) -> list[str]:
    """Parts between the commas that stand in no bracket and in no quotes."""
    parts, depth, start = [], 0, 0
    for match in _BRACKETS_AND_QUOTES.finditer(text):
        depth += (match[0] in "({[") - (match[0] in ")}]")
        if match[0] == "," and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]
