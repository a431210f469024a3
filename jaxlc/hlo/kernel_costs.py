"""FLOPs of a kernel's matrix products, and the bytes it reads from and writes to device memory.

Matrix products are found in fusions (XLA's Triton kernels), in cuBLAS calls, as single `dot`
instructions, and in the Mosaic kernels of experts (`models.kinds.experts`), which multiply each of
their rows once, padding included. All other arithmetic is assumed to cost nothing compared to the
memory traffic.

Each operand is read once and each result written once. A slice reads only the part that it takes,
and an in-place update writes only the part that it replaces; otherwise each round of a loop over
layers would count all stacked parameters.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxlc.core.scopes import EXPERTS
from jaxlc.hlo.parser import Computation, Instruction, Program, components

# Instructions that only name arrays or parts of them; they run no kernel.
_NO_KERNEL = (
    "after-all", "bitcast", "constant", "get-tuple-element", "optimization-barrier", "parameter", "partition-id",
    "replica-id", "tuple",
)  # fmt: skip
_SLICES = ("dynamic-slice", "gather", "slice")  # read a part of their first operand
# index of the operand written into the first one
_UPDATE_OPERAND = {"dynamic-update-slice": 1, "scatter": 2}
_RENAMES = ("bitcast", "reshape")
_FUSIONS = ("fusion", "fusion-start")
_CUBLAS = "__cublas$"
MOSAIC = "mosaic_gpu"  # with a version number
ALLOCATE_BUFFER = "AllocateBuffer"


class Product(NamedTuple):
    """Matrix product of [batch, rows, depth] and [batch, depth, columns]."""

    dtype: str  # XLA's name of the operands' type
    rows: int
    columns: int
    depth: int
    batch: int = 1
    is_grouped: bool = False  # rows are sorted by expert, each of which has a matrix of its own

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.depth


class Cost(NamedTuple):
    flops: float  # matrix products
    dtype: str  # XLA's name of their operands' type; "" without matrix products
    bytes: int  # read from and written to device memory
    products: tuple[Product, ...] = ()


def kernel_cost(
    program: Program, computation: Computation, instruction: Instruction
) -> Cost | None:
    """Cost of one run of `instruction`; None if it runs no kernel. Not for loops, calls,
    collectives, host copies.
    """
    if instruction.opcode in _NO_KERNEL or ALLOCATE_BUFFER in instruction.attributes.get(
        "custom_call_target", ""
    ):
        return None
    products = tuple(_products(program, computation, instruction))
    flops = sum(product.flops for product in products)
    dtype = max(products, key=lambda product: product.flops).dtype if products else ""
    return Cost(flops, dtype, _memory_traffic_bytes(program, computation, instruction), products)


def _products(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[Product]:
    """The matrix products of a kernel."""
    if instruction.opcode == "dot":
        batch_dims = instruction.attributes.get("lhs_batch_dims", "")
        yield matrix_product(
            computation, instruction, instruction.attributes["lhs_contracting_dims"], batch_dims
        )
    elif instruction.opcode in _FUSIONS:
        for name in instruction.called:
            for inner in program.computations[name]:
                yield from _products(program, program.computations[name], inner)
    elif (
        instruction.opcode == "custom-call"
        and _CUBLAS in instruction.attributes["custom_call_target"]
    ):
        dims = instruction.backend_config["gemm_backend_config"]["dot_dimension_numbers"]
        batch_dims = ",".join(dims.get("lhs_batch_dimensions", ()))
        yield matrix_product(
            computation, instruction, ",".join(dims["lhs_contracting_dimensions"]), batch_dims
        )
    elif is_expert_kernel(instruction):
        # The last operands are x [S, K] and w [E, K, N] or [E, N, K], or x and dout [S, N].
        x = next(
            y.arrays[0] for y in computation.operands(instruction) if len(y.arrays[0].dims) == 2
        )
        rows, depth = x.dims
        yield Product(x.dtype, rows, instruction.arrays[0].dims[-1], depth, is_grouped=True)


def is_expert_kernel(instruction: Instruction) -> bool:
    """Whether a custom call is a Mosaic kernel of experts."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    return target.startswith(MOSAIC) and EXPERTS in components(instruction.op_name)


def matrix_product(
    computation: Computation, instruction: Instruction, contracted: str, batch_dims: str = ""
) -> Product:
    """A product that contracts the dimensions `contracted` of its left operand and repeats over
    `batch_dims` of it.
    """
    left = computation.operands(instruction)[0].arrays[0]
    result = instruction.arrays[0]  # cuBLAS also returns its workspace, as the second result
    depth = _size(left.dims, contracted)
    batch = _size(left.dims, batch_dims)
    rows = math.prod(left.dims) // max(1, depth * batch)
    columns = math.prod(result.dims) // max(1, rows * batch)
    return Product(left.dtype, rows, columns, depth, batch)


def _size(dims: tuple[int, ...], chosen: str) -> int:
    return math.prod(dims[int(dim)] for dim in re.findall(r"\d+", chosen))


def _memory_traffic_bytes(
    program: Program, computation: Computation, instruction: Instruction
) -> int:
    if instruction.opcode in _FUSIONS:
        return _fusion_bytes(program.computations[instruction.called[0]])
    num_operands = len(computation.operands(instruction))
    read = sum(_read_bytes(computation, instruction, index) for index in range(num_operands))
    return read + _written_bytes(computation, instruction)


def _fusion_bytes(body: Computation) -> int:
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for instruction in body:
        for index, name in enumerate(instruction.operands):
            users.setdefault(name, []).append((instruction, index))

    def read(name: str) -> int:
        """Bytes of `name` that instructions of the fusion read."""
        return sum(
            read(user.name) if user.opcode in _RENAMES else _read_bytes(body, user, index)
            for user, index in users.get(name, ())
        )

    result = tuple(body)[-1]
    results = body.operands(result) if result.opcode == "tuple" else [result]
    parameters = (instruction for instruction in body if instruction.opcode == "parameter")
    read_bytes = sum(min(read(parameter.name), _bytes(parameter)) for parameter in parameters)
    return read_bytes + sum(_written_bytes(body, _renamed(body, result)) for result in results)


def _renamed(body: Computation, instruction: Instruction) -> Instruction:
    """The instruction that `instruction` is a bitcast or reshape of."""
    while instruction.opcode in _RENAMES:
        (instruction,) = body.operands(instruction)
    return instruction


def _read_bytes(computation: Computation, instruction: Instruction, index: int) -> int:
    """Bytes that `instruction` reads of its operand number `index`."""
    if index == 0 and instruction.opcode in _SLICES:
        return _bytes(instruction)
    if index == 0 and instruction.opcode == "dynamic-update-slice":
        return 0
    if index == 0 and instruction.opcode == "scatter":  # adds to the existing values
        return _written_bytes(computation, instruction)
    return _bytes(computation.operands(instruction)[index])


def _written_bytes(computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode in _UPDATE_OPERAND:
        return _bytes(computation.operands(instruction)[_UPDATE_OPERAND[instruction.opcode]])
    return _bytes(instruction)


def _bytes(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.arrays)
