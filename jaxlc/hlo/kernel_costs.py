"""FLOPs of kernels and the bytes they read from and write to device memory, and the attention kernels
of a compiled program, with the collectives that the schedule overlaps with them.

Matrix products are found in fusions (XLA's Triton kernels), in cuBLAS calls, as single `dot`
instructions, and in the kernels of experts (`models.expert_products`), which multiply each of their
rows once, padding included. All other arithmetic is assumed to cost nothing compared to the
memory traffic.

Each operand is read once and each result written once. A slice reads only the part that it takes,
and an in-place update writes only the part that it replaces; otherwise each round of a loop over
layers would count all stacked parameters.

Attention kernels:

    cudnn      custom calls `__cudnn$fmha...`
    fa3        custom calls `dew_flash3_mha...`
    pallas     custom calls of the kernels in `jaxlc.attention.kernels`, by the name given to `pallas_call`
    mosaic     custom calls `mosaic_gpu...` in the scopes of `kernels/mosaic.py`; if the backward runs over
               pairs of blocks, the loop over all pairs
    blockwise  XLA loops in the scope `core_attention` that contain matrix products and no collectives

Their FLOPs count all pairs of a query and a key. A masked call (`is_masked`) may skip some of them;
how many depends on the mask's values, which the program text does not contain.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxlc.core import scopes
from jaxlc.core.scopes import EXPERTS
from jaxlc.hlo.collectives import Collective
from jaxlc.hlo.parser import (
    COLLECTIVES,
    Computation,
    Instruction,
    Pass,
    Program,
    components,
    is_data_dependent,
    is_in,
    is_in_attention,
    pass_of,
    trip_count,
)

# Instructions that only name arrays or parts of them; they run no kernel.
_NO_KERNEL = (
    "after-all", "bitcast", "constant", "get-tuple-element", "optimization-barrier", "parameter", "partition-id",
    "replica-id", "tuple",
)  # fmt: skip
_CONTROL_FLOW = ("call", "conditional", "while")  # run other instructions
_SLICES = ("dynamic-slice", "gather", "slice")  # read a part of their first operand
# index of the operand written into the first one
_UPDATE_OPERAND = {"dynamic-update-slice": 1, "scatter": 2}
_RENAMES = ("bitcast", "reshape")
_FUSIONS = ("fusion", "fusion-start")
_CUBLAS = "__cublas$"
_RECURRENCE_KERNELS = (
    "delta_factors", "delta_factors_gradient", "delta_scan", "delta_scan_gradient",
)  # fmt: skip
_EXPERT_KERNELS = "expert_product", "expert_gradient"  # of `models.expert_products`
MOSAIC = "mosaic_gpu"  # with a version number
ALLOCATE_BUFFER = "AllocateBuffer"


class Product(NamedTuple):
    """Matrix product of [batch, rows, depth] and [batch, depth, columns]."""

    dtype: str  # XLA's name of the operands' type
    rows: int
    columns: int
    depth: int
    batch: int = 1
    # config.runtime.expert_kernel, if rows are sorted by expert, each of which has a matrix of its own
    expert_kernel: str = ""

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
    if instruction.opcode in _NO_KERNEL or instruction.call_target == ALLOCATE_BUFFER:
        return None
    products = tuple(_products(program, computation, instruction))
    flops = sum(product.flops for product in products)
    dtype = max(products, key=lambda product: product.flops).dtype if products else ""
    if instruction.opcode in _FUSIONS:
        num_bytes = _fusion_bytes(program.computations[instruction.called[0]])
    else:
        num_bytes = _written_bytes(computation, instruction) + sum(
            _read_bytes(computation, instruction, index)
            for index in range(len(computation.operands(instruction)))
        )
    return Cost(flops, dtype, num_bytes, products)


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
    elif _CUBLAS in instruction.call_target:
        dims = instruction.backend_config["gemm_backend_config"]["dot_dimension_numbers"]
        batch_dims = ",".join(dims.get("lhs_batch_dimensions", ()))
        yield matrix_product(
            computation, instruction, ",".join(dims["lhs_contracting_dimensions"]), batch_dims
        )
    elif kernel := expert_kernel(instruction):
        # The last operands are x [S, K] and w [E, K, N] or [E, N, K], or x and dout [S, N].
        x = next(
            y.arrays[0] for y in computation.operands(instruction) if len(y.arrays[0].dims) == 2
        )
        rows, depth = x.dims
        yield Product(x.dtype, rows, instruction.arrays[0].dims[-1], depth, expert_kernel=kernel)
    else:
        yield from _recurrence_products(computation, instruction)


def _recurrence_products(computation: Computation, call: Instruction) -> Iterator[Product]:
    """The products in a kernel of `attention.recurrence.kernel`: products [C, C] of the tokens of a
    chunk, with as many multiplications in all. Exact ones count as float32, as in the XLA form."""
    kernel = delta_kernel(call)
    if kernel is None:
        return
    operands = [x.arrays[0] for x in computation.operands(call)]
    is_forward = kernel == "delta_factors"
    # w [B, L, H, K], an array [B, L, H, C], and one [..., M] of states or outputs
    w, square, *_ = call.arrays if is_forward else operands
    *tokens, key_dim = w.dims
    C = square.dims[-1]
    num_columns = operands[-1].dims[-1]
    # products [C, K] [K, M], in units of products of [C, C] and [C, columns]
    state_products = key_dim * num_columns // C
    narrow, exact = num_columns + 3 * state_products, 0
    if kernel.startswith("delta_factors"):
        values = operands[2] if is_forward else call.arrays[2]
        solved = key_dim + values.dims[-1]
        inverse = 2 * (C.bit_length() - 2) * C
        narrow, exact = 2 * key_dim, inverse + solved
        if not is_forward:
            narrow = 5 * key_dim + num_columns + 4 * state_products
            exact = 2 * solved + key_dim
    batch = math.prod(tokens) // C
    yield Product("bf16", C, C, narrow, batch)
    yield Product("f32", C, C, exact, batch)


def delta_kernel(instruction: Instruction) -> str | None:
    """The name of a custom call, if it is a kernel of `attention.recurrence.kernel`."""
    return _called(instruction, _RECURRENCE_KERNELS)


def expert_kernel(instruction: Instruction) -> str | None:
    """config.runtime.expert_kernel of a custom call that multiplies rows with their experts."""
    if _is_mosaic(instruction) and EXPERTS in components(instruction.op_name):
        return "mosaic"
    return "pallas" if _called(instruction, _EXPERT_KERNELS) else None


def _called(instruction: Instruction, names: tuple[str, ...]) -> str | None:
    """The name of a Pallas kernel, if it is one of `names`."""
    if instruction.opcode != "custom-call":
        return None
    parts = components(instruction.op_name)
    return next((name for name in names if name in parts), None)


def matrix_product(
    computation: Computation, instruction: Instruction, contracted: str, batch_dims: str
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


# Matrix products per pair of a query and a key: (over the head dim of keys, over the head dim of
# values).
_FORWARD = (1, 1)
_PRODUCTS = {
    "__cudnn$fmhaSoftmax": _FORWARD,  # q . k; p . v
    "__cudnn$fmhaSoftmaxBackward": (3, 2),  # q . k, dq, dk; dout . v, dv
    "dew_flash3_mha_fwd": _FORWARD,
    "dew_flash3_mha_bwd": (3, 2),
    "flash_forward": _FORWARD,
    "flash_dq": (2, 1),  # q . k, dq; dout . v
    "flash_dkv": (2, 2),  # q . k, dk; dout . v, dv
    "mosaic_forward": _FORWARD,
    "mosaic_dq": (2, 1),
    "mosaic_dkv": (2, 2),
}
_FA3 = re.compile(r"(dew_flash3_mha_)(varlen_)?(fwd|bwd)")


class Sizes(NamedTuple):
    """Sizes of a call, from the shapes of its operands."""

    num_heads: int  # query heads times batch size
    num_queries: int
    num_keys: int


class AttentionKernelCall(NamedTuple):
    instruction: Instruction
    # "cudnn", "fa3", "cudnn_packed" or "fa3_packed" (with lengths and offsets of documents),
    # "pallas", "mosaic" or "blockwise"
    kernel: str
    pass_name: Pass
    full_flops: float  # one run, over all pairs of a query and a key
    is_masked: bool  # the kernel may skip masked pairs
    sizes: Sizes | None  # None for blockwise loops, whose operands may have any layout
    has_window: bool = False  # it belongs to a layer with a sliding window
    is_ring_step: bool = False  # its keys are the KV block of another rank
    # it takes the documents that the first packed call of a mask leaves
    has_further_documents: bool = False
    head_dim: int = 128  # queries and keys; 128 for a blockwise loop, whose operands do not show it
    # its queries are of branches, its keys of the prefix that they continue
    is_over_prefix: bool = False
    num_kernels: int = 1  # of one run; a blockwise loop has some for each pair of blocks
    num_conditionals: int = 0  # for which the GPU waits for the host

    @property
    def is_backward(self) -> bool:
        return self.pass_name == "backward"


class CountedCall(NamedTuple):
    call: AttentionKernelCall
    times: int  # executions in one run of the program


def find_attention_calls(program: Program, execution_counts: Counter[str]) -> Iterator[CountedCall]:
    """Calls of attention kernels that run at least once; every branch of a conditional counts."""
    kernel_bodies = set()  # computations inside of kernels that are loops
    for computation in reversed(list(program)):  # callers before callees
        if not execution_counts[computation.name]:
            continue
        if computation.name in kernel_bodies:
            kernel_bodies.update(name for instruction in computation for name in instruction.called)
            continue
        for instruction in computation:
            call = attention_kernel(program, computation, instruction)
            if call is not None:
                yield CountedCall(call, execution_counts[computation.name])
                kernel_bodies.update(instruction.called)


def calls_within(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[AttentionKernelCall]:
    """The attention kernel that `instruction` is, or those that it runs as a loop, with the FLOPs
    of all rounds.
    """
    call = attention_kernel(program, computation, instruction)
    if call is not None:
        yield call
    elif instruction.opcode == "while":
        for times, body, inner in _inside(program, instruction):
            call = attention_kernel(program, body, inner) if inner.opcode == "custom-call" else None
            if call is not None:
                yield call._replace(full_flops=times * call.full_flops)


def attention_kernel(
    program: Program, computation: Computation, instruction: Instruction
) -> AttentionKernelCall | None:
    """The attention kernel that `instruction` is; None if it is not one."""
    if instruction.opcode == "while" and is_in_attention(instruction.op_name):
        if scopes.MOSAIC_PAIRS in instruction.op_name.split("/"):
            return _mosaic_pairs(program, instruction)
        return _blockwise(program, instruction)
    if instruction.opcode == "fusion" and instruction.attributes.get("kind") == "kCustom":
        # XLA fuses a call of a foreign function with slices of the arrays that it reads and writes.
        body = program.computations[instruction.called[0]]
        calls = (attention_kernel(program, body, x) for x in body if x.opcode == "custom-call")
        call = next(filter(None, calls), None)
        return call and call._replace(instruction=instruction)
    if instruction.opcode != "custom-call":
        return None
    target = instruction.call_target
    if match := _FA3.fullmatch(target):
        return _fa3(computation, instruction, *match.groups())
    if target in _PRODUCTS:
        settings = instruction.backend_config["cudnn_fmha_backend_config"]
        kernel = "cudnn_packed" if documents_per_row(instruction) > 1 else "cudnn"
        return _custom_call(
            computation, instruction, kernel, target, is_masked=settings["mask_type"] != "NO_MASK"
        )
    if _is_mosaic(instruction):
        return _mosaic(computation, instruction)
    for name in instruction.op_name.split("/"):
        if name in _PRODUCTS:
            operands = [operand.arrays[0] for operand in computation.operands(instruction)]
            # [B, T]
            has_tokens = any(array.dtype == "s32" and len(array.dims) == 2 for array in operands)
            return _custom_call(computation, instruction, "pallas", name, is_masked=has_tokens)
    return None


def documents_per_row(call: Instruction) -> int:
    """Documents per row of the batch of a cuDNN call; 1 for a call without offsets."""
    return int(call.backend_config["cudnn_fmha_backend_config"].get("max_seg_per_batch", 1))


def _fa3(
    computation: Computation, call: Instruction, prefix: str, varlen: str | None, direction: str
) -> AttentionKernelCall:
    """A variable-length call as one of a batch of its longest documents, as cuDNN's."""
    settings = dict(re.findall(r"(\w+) = (-?\w+)", call.attributes.get("backend_config", "")))
    qkv = [x.arrays[0].dims for x in computation.operands(call)[direction == "bwd" :][:3]]
    if varlen:
        lengths = [int(settings[name]) for name in ("max_seqlen", "max_seqlen_k")]
        batch = qkv[0][0] // lengths[0]
        lengths.append(lengths[1])
        qkv = [(batch, length, *dims[1:]) for length, dims in zip(lengths, qkv)]
    is_masked = bool(varlen) or settings["is_causal"] == "true"
    kernel = "fa3_packed" if varlen else "fa3"
    return _kernel_call(call, kernel, prefix + direction, is_masked, qkv)


def _custom_call(
    computation: Computation, call: Instruction, kernel: str, name: str, is_masked: bool
) -> AttentionKernelCall:
    """A kernel whose first operands are q_BTNH, k_BSKH and v_BSKH."""
    qkv = [operand.arrays[0].dims for operand in computation.operands(call)[:3]]
    return _kernel_call(call, kernel, name, is_masked, qkv)


def _kernel_call(
    call: Instruction, kernel: str, name: str, is_masked: bool, qkv: Sequence[tuple[int, ...]]
) -> AttentionKernelCall:
    """A kernel with q_BTNH, k_BSKH and v_BSKH of these sizes; k and v may have layers between B and
    S.
    """
    (batch, num_queries, num_heads, head_dim), (*_, num_keys, _, _), (*_, value_dim) = qkv
    sizes = Sizes(batch * num_heads, num_queries, num_keys)
    over_keys, over_values = _PRODUCTS[name]
    flops = 2.0 * math.prod(sizes) * (over_keys * head_dim + over_values * value_dim)
    pass_name = pass_of(call.op_name)
    # a layer in tiles recomputes its forward itself
    if pass_name == "backward" and _PRODUCTS[name] == _FORWARD:
        pass_name = "recomputation"
    return AttentionKernelCall(
        call,
        kernel,
        pass_name,
        flops,
        is_masked,
        sizes,
        is_in(call.op_name, scopes.SLIDING_WINDOW),
        is_in(call.op_name, scopes.RING_STEP),
        is_data_dependent(call.op_name),
        head_dim,
        is_in(call.op_name, scopes.SHARED_PREFIX),
    )


def _is_mosaic(instruction: Instruction) -> bool:
    return instruction.call_target.startswith(MOSAIC)


def _mosaic(computation: Computation, call: Instruction) -> AttentionKernelCall | None:
    names = call.op_name.split("/")
    if scopes.MOSAIC_FORWARD in names:
        name = "mosaic_forward"
    elif scopes.MOSAIC_BACKWARD in names:
        name = "mosaic_dq" if len(call.arrays) == 1 else "mosaic_dkv"
    else:
        return None
    has_ranges = any(operand.arrays[0].dtype == "s32" for operand in computation.operands(call))
    return _custom_call(
        computation, call, "mosaic", name, is_masked=scopes.MOSAIC_CAUSAL in names or has_ranges
    )


def _mosaic_pairs(program: Program, loop: Instruction) -> AttentionKernelCall | None:
    """The backward over pairs of blocks as one call, which is masked; its queries are the queries
    of all pairs.
    """
    calls = [
        (times, call)
        for times, computation, instruction in _inside(program, loop)
        if instruction.opcode == "custom-call"
        and (call := attention_kernel(program, computation, instruction))
    ]
    if not calls:
        return None
    num_pairs, first = calls[0]
    flops = sum(times * call.full_flops for times, call in calls)
    assert first.sizes is not None
    sizes = first.sizes._replace(num_queries=num_pairs * first.sizes.num_queries)
    return first._replace(instruction=loop, full_flops=flops, is_masked=True, sizes=sizes)


def _blockwise(program: Program, loop: Instruction) -> AttentionKernelCall | None:
    flops = 0.0
    counts = Counter()  # of executions, by opcode
    num_kernels = 0
    bodies = set()  # of kernels
    for times, computation, instruction in _inside(program, loop):
        if _is_mosaic(instruction):
            return None  # a loop over calls of a kernel; its products are out . dout
        counts[instruction.opcode.removesuffix("-start")] += times
        if instruction.opcode not in _FUSIONS:  # whose bodies are inside, too
            products = _products(program, computation, instruction)
            flops += times * sum(product.flops for product in products)
        is_inner = computation.name in bodies
        if is_inner or instruction.opcode not in _CONTROL_FLOW:
            bodies.update(instruction.called)
            if not is_inner and instruction.opcode not in _NO_KERNEL:
                num_kernels += times
    if flops == 0 or counts.keys() & set(COLLECTIVES):
        return None
    return AttentionKernelCall(
        loop,
        "blockwise",
        pass_of(loop.op_name),
        flops,
        is_masked="conditional" in counts,  # which skips fully masked tiles
        sizes=None,
        has_window=is_in(loop.op_name, scopes.SLIDING_WINDOW),
        is_ring_step=is_in(loop.op_name, scopes.RING_STEP),
        num_kernels=num_kernels,
        num_conditionals=counts["conditional"],
    )


def _inside(
    program: Program, instruction: Instruction
) -> Iterator[tuple[int, Computation, Instruction]]:
    """All instructions that a loop, or another instruction that calls some, runs: (executions in one
    run of it, computation, instruction).
    """
    rounds = trip_count(program, instruction) if instruction.opcode == "while" else 1
    for name in instruction.called:
        body = program.computations[name]
        for inner in body:
            yield rounds, body, inner
            for times, computation, innermost in _inside(program, inner):
                yield rounds * times, computation, innermost


class AttentionCollective(NamedTuple):
    """One collective that attention runs, on all ranks at once."""

    collective: Collective
    pass_name: Pass
    # Attention kernels between its start and its done; of kernels in a loop, one entry with the
    # FLOPs of all rounds.
    overlapped_calls: tuple[AttentionKernelCall, ...]
    has_window: bool  # it belongs to a layer with a sliding window
    # sent between its start and its done: its own bytes and the bytes of overlapping ones
    link_bytes: int

    @property
    def times(self) -> int:
        """How often it runs in one run of the program."""
        return self.collective.times

    @property
    def is_unoverlapped(self) -> bool:
        """Whether no attention kernel runs between start and done. This is read from the schedule,
        not estimated.
        """
        return not self.overlapped_calls


def find_attention_collectives(
    program: Program, collectives: Sequence[Collective]
) -> Iterator[AttentionCollective]:
    """Those of `collectives`, the program's, that run in the scope `core_attention`."""
    transfers = [
        collective
        for collective in collectives
        if is_in_attention(collective.transfer.start.op_name)
    ]
    for collective in transfers:
        transfer = collective.transfer
        calls = (
            call
            for op in transfer.overlapped_ops
            for call in calls_within(program, transfer.computation, op)
        )
        concurrent = (
            other.sent_bytes
            for other in transfers
            if other is not collective and transfer.overlaps(other.transfer)
        )
        yield AttentionCollective(
            collective,
            pass_of(transfer.start.op_name),
            tuple(calls),
            is_in(transfer.start.op_name, scopes.SLIDING_WINDOW),
            collective.sent_bytes + sum(concurrent),
        )
