"""Parses the HLO text of a compiled program (`compiled.as_text()`) into computations and instructions.

    HloModule jit_step, is_scheduled=true, ...
    %body (...) -> ... {
      %name = shape opcode(%operand, ...), attribute=value, calls=%computation, metadata={...}, backend_config={...}
      ...
    }
    ENTRY %main (...) -> ... {

A computation precedes its callers. In a scheduled module, instructions are listed in the order in which they run.
A shape is written `bf16[1,32768,32,128]{3,2,1,0:S(5)}`, where S(5) is the memory space; a tuple lists several.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jaxlc.core.foreign_files import parse_json

HOST_MEMORY = 5  # XLA's memory space of pinned host memory; 0 is device memory

_COMMENT = re.compile(r"/\*index=\d+\*/")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.$-]+) = (.*)")
_NAME = re.compile(r"%([\w.$-]+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\](?:\{([^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_CALLS = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation")


class Array(NamedTuple):
    """Shape of one array."""

    dtype: str  # XLA's name: "bf16", "f32", "pred"
    dims: tuple[int, ...]
    memory_space: int

    @property
    def bytes(self) -> int:
        return math.ceil(math.prod(self.dims) * _bits(self.dtype) / 8)


def parse_shape(text: str) -> tuple[Array, ...]:
    """All arrays of a shape, in order; nested tuples are flattened."""
    return tuple(_array(*match.groups()) for match in _ARRAY.finditer(text))


def _array(dtype: str, dims: str, layout: str | None) -> Array:
    sizes = tuple(int(size.strip(" <=")) for size in dims.split(",") if size)  # "<=" marks an upper bound
    space = _SPACE.search(layout or "")
    return Array(dtype, sizes, int(space[1]) if space else 0)


def required(match: re.Match[str] | None, text: str) -> re.Match[str]:
    """`match`; ValueError if the program's text does not have the expected form."""
    if match is None:
        raise ValueError(f"unexpected form in the text of a compiled program: {text!r}")
    return match


def _bits(dtype: str) -> int:
    """Bits per element. A pred takes a byte, a token nothing; other names contain their width: s32, f8e4m3fn, c64."""
    if dtype in ("token", "opaque"):
        return 0
    return 8 if dtype == "pred" else int(required(re.search(r"\d+", dtype), dtype)[0])


class Instruction:
    """One instruction of a computation. Properties are parsed on first use."""

    def __init__(self, name: str, shape: str, opcode: str, arguments: str, attributes: str):
        self.name, self.opcode = name, opcode
        self.arguments = arguments  # as written; of a constant, its value
        self._shape, self._attributes = shape, attributes

    def __repr__(self) -> str:
        return f"%{self.name} = {self.opcode}({self.arguments})"

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays of its result; several for a tuple."""
        return parse_shape(self._shape)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of its operands, instructions of the same computation."""
        return tuple(_NAME.findall(self.arguments))

    @cached_property
    def attributes(self) -> dict[str, str]:
        return dict(part.split("=", 1) for part in _split(self._attributes) if "=" in part)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        return tuple(name for key in _CALLS for name in _NAME.findall(self.attributes.get(key, "")))

    @cached_property
    def op_name(self) -> str:
        """Path of its JAX operation, e.g. "jit(step)/transpose(jvp())/while/body/ppermute"; "" if unknown."""
        match = re.search(r'op_name="([^"]*)"', self.attributes.get("metadata", ""))
        return match[1] if match else ""

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        """The GPU compiler's annotations; empty if there are none, or if they are not JSON."""
        try:
            return parse_json(self.attributes.get("backend_config", "{}"))
        except ValueError:
            return {}


@dataclass(frozen=True, eq=False)
class Computation:
    """A named sequence of instructions: the entry, a loop body, the body of a fusion."""

    name: str
    instructions: dict[str, Instruction]  # by name, in the program's order

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]


@dataclass(frozen=True, eq=False)
class Program:
    """An HLO module."""

    computations: dict[str, Computation]  # callees before callers
    entry: Computation
    is_scheduled: bool  # instructions are listed in the order in which they run

    def __iter__(self) -> Iterator[Computation]:
        return iter(self.computations.values())


def parse(text: str) -> Program:
    """Parses `compiled.as_text()`.

    Raises:
      ValueError: the text has no ENTRY computation.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    current: Computation | None = None
    for line in text.splitlines():
        if current is None:
            header = _COMPUTATION.match(line)
            if header:
                current = computations[header[2]] = Computation(header[2], {})
                entry = current if header[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            instruction = _instruction(line)
            current.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("not the text of a compiled program: no ENTRY computation")
    return Program(computations, entry, "is_scheduled=true" in text.partition("\n")[0])


def _instruction(line: str) -> Instruction:
    name, rest = required(_INSTRUCTION.match(_COMMENT.sub("", line)), line).groups()
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closing(rest, len(opcode))
    return Instruction(name, shape, opcode, rest[len(opcode) + 1 : end - 1], rest[end:])


_BRACKETS_AND_QUOTES = re.compile(r'[(){}\[\],]|"(?:[^"\\]|\\.)*"')


def _closing(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`."""
    depth = 0
    for match in _BRACKETS_AND_QUOTES.finditer(text, start):
        depth += (match[0] in "({[") - (match[0] in ")}]")
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced brackets: {text}")


def _split(text: str) -> list[str]:
    """Splits at the commas that are outside of brackets and quotes."""
    parts: list[str] = []
    depth, start = 0, 0
    for match in _BRACKETS_AND_QUOTES.finditer(text):
        depth += (match[0] in "({[") - (match[0] in ")}]")
        if match[0] == "," and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]
