"""Parses the HLO text of a compiled program (`compiled.as_text()`) into computations and instructions.

    HloModule jit_step, is_scheduled=true, ...
    %body (...) -> ... {
      %name = shape opcode(%operand, ...), attribute=value, calls=%computation, metadata={...}, backend_config={...}
      ...
    }
    ENTRY %main (...) -> ... {

A computation precedes its callers. In a scheduled module, instructions are listed in the order in which they run.
A shape is written `bf16[1,32768,32,128]{3,2,1,0:S(5)}`, where S(5) is the memory space; a tuple lists several.

Names
-----
Scopes, pass and a readable label of an instruction are read from its `op_name`. An `op_name` is the path of a JAX
operation:

    jit(_step)/while/body/closed_call/transpose(jvp())/while/body/checkpoint/attention/shard_map/core_attention/ppermute

Its components are of three kinds: scopes that this package sets (`jaxlc.core.scopes`), marks that JAX adds for its
own transformations and control flow, and, last, the primitive. Membership in a part of the model is read from scopes
only. Two things are known from JAX's marks alone, and all knowledge of these marks is in this module:

- the pass. `jax.checkpoint` marks what it recomputes with "rematted_computation"; the transpose of differentiation
  is marked "transpose(...)". A scope could not tell: the same Python code is traced once for all three passes.
- which components carry no information for a reader (`_MARKS`).

Where XLA merges instructions it merges their names too: "prefix/(path:path:path)".

Schedule
--------
An asynchronous operation is a pair of a start and a done, with the instructions that the schedule puts between them.
The trip counts of loops say how often each computation runs in one run of the program.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from jaxlc.core.files import parse_json
from jaxlc.core.scopes import CORE_ATTENTION, FIRST_RING_STEPS, MORE_DOCUMENTS, RECURRENCE, SCOPES

Pass = Literal["forward", "recomputation", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "recomputation", "backward")

_RECOMPUTED = "rematted_computation"
_TRANSPOSED = "transpose("
# not jit(...), which contains the name of a function
_TRANSFORMED = re.compile(r"(?:transpose|jvp|vmap)\((.*)\)$")
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

    A merged instruction belongs to them if all its parts do: XLA merges the all-gather of segment
    ids with all-gathers of weights.
    """
    return all(CORE_ATTENTION in components(path) for path in _paths(op_name))


def is_in_token_mixing(op_name: str) -> bool:
    """As `is_in_attention`, or to the recurrence of linear attention, convolutions included."""
    mixing = {CORE_ATTENTION, *RECURRENCE}
    return all(mixing & set(components(path)) for path in _paths(op_name))


def innermost_scope(op_name: str) -> str:
    """The last scope of an instruction, "" if it has none; a merged instruction has the scope of
    its first path.
    """
    scopes = [part for part in components(_paths(op_name)[0]) if part in SCOPES]
    return scopes[-1] if scopes else ""


def is_data_dependent(op_name: str) -> bool:
    """Whether the number of executions depends on the documents of a packed sequence."""
    return is_in(op_name, MORE_DOCUMENTS)


def is_in(op_name: str, scope: str) -> bool:
    """Whether an instruction, or a part of a merged one, belongs to a scope."""
    return any(scope in components(path) for path in _paths(op_name))


def pass_of(op_name: str) -> Pass:
    """The pass of an instruction, from JAX's own marks; see the head of this module."""
    if _RECOMPUTED in op_name:
        return "recomputation"
    return "backward" if _TRANSPOSED in op_name else "forward"


def label(op_name: str) -> str:
    """A short description for people: "embedding, backward: scatter-add", "loss/logits, forward:
    matrix product".

    Names the scopes, the pass and the operation. Without a scope it names the components that are
    not JAX's marks. A merged instruction is described by its first path. The name of an argument is
    returned as it is.
    """
    path = _paths(op_name)[0].replace("\\'", "'")
    if "/" not in path:
        return path
    *parts, operation = components(path)
    names = [part for part in parts if part in SCOPES]
    if not names and operation == "dynamic_update_slice" and "while" in parts:
        # `jax.lax.scan` stacks what its rounds save
        return f"layers, {pass_of(path)}: saved activations"
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


HOST_MEMORY = 5  # XLA's memory space of pinned host memory; 0 is device memory

_COMMENT = re.compile(r"/\*index=\d+\*/")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.$-]+) = (.*)")
_NAME = re.compile(r"%([\w.$-]+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\](?:\{([^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_CALLS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
)


class Array(NamedTuple):
    """Shape of one array."""

    dtype: str  # XLA's name: "bf16", "f32", "pred"
    dims: tuple[int, ...]
    memory_space: int

    @property
    def bytes(self) -> int:
        """A pred takes a byte, a token nothing; other names contain their width in bits: s32, f8e4m3fn,
        c64.
        """
        if self.dtype in ("token", "opaque"):
            return 0
        width = re.search(r"\d+", self.dtype)
        bits = 8 if self.dtype == "pred" else int(required(width, self.dtype)[0])
        return math.ceil(math.prod(self.dims) * bits / 8)


def parse_shape(text: str) -> tuple[Array, ...]:
    """All arrays of a shape, in order; nested tuples are flattened."""
    arrays = []
    for dtype, dims, layout in _ARRAY.findall(text):
        # "<=" marks an upper bound
        sizes = tuple(int(size.strip(" <=")) for size in dims.split(",") if size)
        space = _SPACE.search(layout)
        arrays.append(Array(dtype, sizes, int(space[1]) if space else 0))
    return tuple(arrays)


def required(match: re.Match[str] | None, text: str) -> re.Match[str]:
    """`match`; ValueError if the program's text does not have the expected form."""
    if match is None:
        raise ValueError(f"unexpected form in the text of a compiled program: {text!r}")
    return match


@dataclass(eq=False, repr=False)
class Instruction:
    """One instruction of a computation. Properties are parsed on first use."""

    name: str
    _shape: str
    opcode: str
    arguments: str  # as written; of a constant, its value
    _attributes: str

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

    @property
    def call_target(self) -> str:
        """The function of a custom call; "" of other instructions."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        return tuple(name for key in _CALLS for name in _NAME.findall(self.attributes.get(key, "")))

    @cached_property
    def op_name(self) -> str:
        """Path of its JAX operation, e.g. "jit(step)/transpose(jvp())/while/body/ppermute"; "" if
        unknown.
        """
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
        return [
            self.instructions[name] for name in instruction.operands if name in self.instructions
        ]


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
            name, rest = required(_INSTRUCTION.match(_COMMENT.sub("", line)), line).groups()
            end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
            shape = rest[:end]
            rest = rest[end:].lstrip()
            opcode, _, _ = rest.partition("(")
            end = _closing(rest, len(opcode))
            arguments = rest[len(opcode) + 1 : end - 1]
            current.instructions[name] = Instruction(name, shape, opcode, arguments, rest[end:])
    if entry is None:
        raise ValueError("not the text of a compiled program: no ENTRY computation")
    return Program(computations, entry, "is_scheduled=true" in text.partition("\n")[0])


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
    depth = 0
    start = 0
    for match in _BRACKETS_AND_QUOTES.finditer(text):
        depth += (match[0] in "({[") - (match[0] in ")}]")
        if match[0] == "," and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-broadcast", "collective-permute",
    "reduce-scatter",
)  # fmt: skip


class Transfer(NamedTuple):
    """A collective or a copy. A synchronous one has the same instruction as start and done."""

    kind: str  # the opcode without "-start": "collective-permute", "copy", "dynamic-update-slice"
    start: Instruction
    done: Instruction
    computation: Computation
    start_index: int  # positions of start and done in the schedule of the computation
    done_index: int
    overlapped_ops: tuple[Instruction, ...]  # instructions between start and done

    def overlaps(self, other: "Transfer") -> bool:
        """Whether both are in flight at the same time."""
        return (
            self.computation is other.computation
            and self.start_index < other.done_index
            and other.start_index < self.done_index
        )


def transfers(program: Program, computation: Computation) -> Iterator[Transfer]:
    """Transfers of a computation, ordered by their done; without the transfers of the computations
    it calls.

    Raises:
      ValueError: the program is not scheduled, so the order of its instructions has no meaning.
    """
    if not program.is_scheduled:
        raise ValueError(
            "the program is not scheduled: its instructions are not in execution order"
        )
    instructions = tuple(computation)
    start_indices = {}  # by name of the start, and of each -update, which continues one
    for index, instruction in enumerate(instructions):
        if instruction.opcode in COLLECTIVES:
            yield Transfer(
                instruction.opcode, instruction, instruction, computation, index, index, ()
            )
        elif instruction.opcode.endswith("-start"):
            start_indices[instruction.name] = index
        elif instruction.opcode.endswith("-update") and instruction.operands[0] in start_indices:
            start_indices[instruction.name] = start_indices[instruction.operands[0]]
        elif instruction.opcode.endswith("-done"):
            start_index = start_indices[instruction.operands[0]]
            start = instructions[start_index]
            # the compiler marked the pair as synchronous: nothing runs between them
            is_sync = start.backend_config.get("collective_backend_config", {}).get("is_sync")
            overlapped = () if is_sync else instructions[start_index + 1 : index]
            kind = start.opcode.removesuffix("-start")
            if kind == "async":  # the root, the last instruction, of the computation that it calls
                kind = tuple(program.computations[start.called[0]])[-1].opcode
            yield Transfer(kind, start, instruction, computation, start_index, index, overlapped)


_KNOWN = "known_trip_count"


def count_executions(program: Program, *, skips_ring_steps: bool) -> Counter[str]:
    """How often each computation runs, by name. Every branch of a conditional counts, so this is an
    upper bound.

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
    skips = {  # a branch with a ring whose later steps no document needs
        name: any(is_in(x.op_name, FIRST_RING_STEPS) for x in program.computations[name])
        for name in instruction.called
    }
    return [name for name in skips if not any(skips.values()) or skips[name] == skips_ring_steps]


def trip_count(program: Program, loop: Instruction) -> int:
    """Trip count of a `while`: the compiler's annotation, or the constant to which its condition
    compares.

    0 for the loop over further packed documents, whose trip count depends on the data: with one
    document it does not run.

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
    callees = (
        name for instruction in program.computations[condition] for name in instruction.called
    )
    for name in (condition, *callees):
        for instruction in program.computations[name]:
            if instruction.opcode == "constant" and instruction.arguments.lstrip("-").isdigit():
                constants.append(int(instruction.arguments))
            is_below |= instruction.attributes.get("direction") == "LT"
    if len(constants) != 1 or not is_below:
        raise ValueError(f"unknown trip count of loop %{loop.name}")
    return constants[0]  # jax.lax.scan and fori_loop count from 0 by 1


def is_host_controlled(loop: Instruction) -> bool:
    """Whether the compiler does not know the trip count, so that the host waits for the condition
    of each round.
    """
    return _KNOWN not in loop.backend_config
