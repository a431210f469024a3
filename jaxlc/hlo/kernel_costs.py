"""What a kernel of a compiled program multiplies, and what it moves between the GPU's memory and itself.

FLOPs are those of matrix products, wherever they are: in a fusion (as XLA's Triton kernels are), in a call of cuBLAS,
or on their own. Everything else that a kernel computes is taken for free next to the bytes it moves, as it mostly is.

Bytes are each operand read once and each result written once, but of a slice only what is taken out, and of an update
in place only what is put in: loops over layers slice stacked parameters, and would seem to read all layers in each.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxlc.hlo.parser import Computation, Instruction, Program

# What becomes no kernel: names for arrays, or for parts of them.
_NO_KERNEL = (
    "after-all", "bitcast", "constant", "get-tuple-element", "optimization-barrier", "parameter", "partition-id",
    "replica-id", "tuple",
)  # fmt: skip
_TAKES_PART = ("dynamic-slice", "gather", "slice")  # of their first operand
_PUTS_IN = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that is put into the first one
_RENAMES = ("bitcast", "reshape")
_FUSIONS = ("fusion", "fusion-start")
_CUBLAS = "__cublas$"
ALLOCATE_BUFFER = "AllocateBuffer"


class Cost(NamedTuple):
    flops: float  # of matrix products
    dtype: str  # of what they multiply, as XLA names it; "" where there are none
    bytes: int  # read from the GPU's memory, and written to it


def kernel_cost(program: Program, computation: Computation, instruction: Instruction) -> Cost | None:
    """Of one run of `instruction`; None if it runs no kernel. Not for loops and calls, nor for what is sent."""
    if instruction.opcode in _NO_KERNEL or ALLOCATE_BUFFER in instruction.attributes.get("custom_call_target", ""):
        return None
    products = list(_products(program, computation, instruction))
    flops = sum(flops for flops, _ in products)
    dtype = max(products)[1] if products else ""
    return Cost(flops, dtype, _moved_bytes(program, computation, instruction))


def _products(program: Program, computation: Computation, instruction: Instruction) -> Iterator[tuple[float, str]]:
    """FLOPs and data type of each matrix product of a kernel."""
    if instruction.opcode == "dot":
        yield matrix_product(computation, instruction, instruction.attributes["lhs_contracting_dims"])
    elif instruction.opcode in _FUSIONS:
        for name in instruction.called:
            for inner in program.computations[name]:
                yield from _products(program, program.computations[name], inner)
    elif instruction.opcode == "custom-call" and _CUBLAS in instruction.attributes["custom_call_target"]:
        dims = instruction.backend_config["gemm_backend_config"]["dot_dimension_numbers"]
        yield matrix_product(computation, instruction, ",".join(dims["lhs_contracting_dimensions"]))


def matrix_product(computation: Computation, instruction: Instruction, contracted: str) -> tuple[float, str]:
    """FLOPs and data type of a product that sums over the dimensions `contracted` of its left operand."""
    left = computation.operands(instruction)[0].arrays[0]
    result = instruction.arrays[0]  # cuBLAS gives its workspace, too, after it
    depth = math.prod(left.dims[int(dim)] for dim in re.findall(r"\d+", contracted))
    return 2.0 * math.prod(result.dims) * depth, left.dtype


def _moved_bytes(program: Program, computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode in _FUSIONS:
        return _fusion_bytes(program.computations[instruction.called[0]])
    read = sum(_read_bytes(computation, instruction, place) for place in range(len(computation.operands(instruction))))
    return read + _written_bytes(computation, instruction)


def _fusion_bytes(body: Computation) -> int:
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for instruction in body:
        for place, name in enumerate(instruction.operands):
            users.setdefault(name, []).append((instruction, place))

    def read(name: str) -> int:
        """Bytes of `name` that the fusion's instructions read."""
        return sum(
            read(user.name) if user.opcode in _RENAMES else _read_bytes(body, user, place)
            for user, place in users.get(name, ())
        )

    result = tuple(body)[-1]
    results = body.operands(result) if result.opcode == "tuple" else [result]
    parameters = (each for each in body if each.opcode == "parameter")
    return sum(min(read(each.name), _bytes(each)) for each in parameters) + sum(
        _written_bytes(body, _renamed(body, each)) for each in results
    )


def _renamed(body: Computation, instruction: Instruction) -> Instruction:
    """What `instruction` is another name of."""
    while instruction.opcode in _RENAMES:
        (instruction,) = body.operands(instruction)
    return instruction


def _read_bytes(computation: Computation, instruction: Instruction, place: int) -> int:
    """Of the operand at `place`. What is not there is of another computation, and a name only."""
    if place == 0 and instruction.opcode in _TAKES_PART:
        return _bytes(instruction)
    if place == 0 and instruction.opcode == "dynamic-update-slice":
        return 0
    if place == 0 and instruction.opcode == "scatter":  # adds to what is there
        return _written_bytes(computation, instruction)
    return _bytes(computation.operands(instruction)[place])


def _written_bytes(computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode in _PUTS_IN:
        return _bytes(computation.operands(instruction)[_PUTS_IN[instruction.opcode]])
    return _bytes(instruction)


def _bytes(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.arrays)
