"""Which instructions of a compiled program are attention kernels, and how much they compute.

    cudnn      custom calls `__cudnn$fmha...`
    pallas     custom calls of our own kernels (`jaxlc.kernels`), by the name that each gives itself
    blockwise  XLA loops inside attention's `shard_map` that multiply matrices and send nothing

FLOPs here are what a call computes if it leaves nothing out: over all its queries x keys. A mask that lets it skip
some is the caller's to count (`is_masked`), for its extent is data.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxlc.hlo.async_ops import COLLECTIVES
from jaxlc.hlo.kernel_costs import matrix_product
from jaxlc.hlo.op_names import Pass, is_in_attention, pass_of
from jaxlc.hlo.parser import Computation, Instruction, Program
from jaxlc.hlo.trip_counts import trip_count

# Matrix products of a kernel for each pair of a query and a key: over the head dim of keys, and over that of values.
_PRODUCTS = {
    "__cudnn$fmhaSoftmax": (1, 1),  # q . k; p . v
    "__cudnn$fmhaSoftmaxBackward": (3, 2),  # q . k, dq, dk; dout . v, dv
    "flash_forward": (1, 1),
    "flash_dq": (2, 1),  # q . k, dq; dout . v
    "flash_dkv": (2, 2),  # q . k, dk; dout . v, dv
}
_FORWARD_KERNELS = ("__cudnn$fmhaSoftmax", "flash_forward")


class Sizes(NamedTuple):
    """What the operands of a call say."""

    num_heads: int  # of queries, times the batch
    num_queries: int
    num_keys: int


class AttentionKernelCall(NamedTuple):
    instruction: Instruction
    kernel: str  # "cudnn", "pallas" or "blockwise"
    which: Pass
    full_flops: float  # of one run, over all pairs of a query and a key
    is_masked: bool  # pairs that no query sees may be left out
    sizes: Sizes | None  # None of a loop over tiles, whose operands are of any form

    @property
    def is_backward(self) -> bool:
        return self.which == "backward"


def attention_kernels(program: Program, computation: Computation) -> Iterator[AttentionKernelCall]:
    """The attention kernels that the computation itself calls, in its order; a kernel that is a loop is one call."""
    for instruction in computation:
        call = attention_kernel(program, computation, instruction)
        if call is not None:
            yield call


def calls_within(program: Program, computation: Computation, instruction: Instruction) -> Iterator[AttentionKernelCall]:
    """`instruction` as an attention kernel, or those that it runs as a loop, each with the FLOPs of all rounds."""
    call = attention_kernel(program, computation, instruction)
    if call is not None:
        yield call
    elif instruction.opcode == "while":
        for times, inner, each in _inside(program, instruction):
            call = attention_kernel(program, inner, each) if each.opcode == "custom-call" else None
            if call is not None:
                yield call._replace(full_flops=times * call.full_flops)


def attention_kernel(
    program: Program, computation: Computation, instruction: Instruction
) -> AttentionKernelCall | None:
    """`instruction` as an attention kernel; None if it is none."""
    if instruction.opcode == "while" and is_in_attention(instruction.op_name):
        return _blockwise(program, instruction)
    if instruction.opcode != "custom-call":
        return None
    target = instruction.attributes["custom_call_target"].strip('"')
    if target in _PRODUCTS:
        mask = instruction.backend_config["cudnn_fmha_backend_config"]["mask_type"]
        return _custom_call(computation, instruction, "cudnn", target, is_masked=mask != "NO_MASK")
    for name in instruction.op_name.split("/"):
        if name in _PRODUCTS:
            operands = [each.arrays[0] for each in computation.operands(instruction)]
            has_tokens = any(array.dtype == "s32" and len(array.dims) == 2 for array in operands)  # [B, T]
            return _custom_call(computation, instruction, "pallas", name, is_masked=has_tokens)
    return None


def _custom_call(computation: Computation, call: Instruction, kernel: str, name: str, is_masked: bool):
    """Of a kernel whose first operands are q_BTNH, k_BSKH and v_BSKH."""
    (batch, num_queries, num_heads, head_dim), (_, num_keys, _, _), (_, _, _, value_dim) = (
        each.arrays[0].dims for each in computation.operands(call)[:3]
    )
    sizes = Sizes(batch * num_heads, num_queries, num_keys)
    over_keys, over_values = _PRODUCTS[name]
    flops = 2.0 * math.prod(sizes) * (over_keys * head_dim + over_values * value_dim)
    which = pass_of(call.op_name)
    if which == "backward" and name in _FORWARD_KERNELS:  # a layer in tiles runs its forward again by itself
        which = "recomputation"
    return AttentionKernelCall(call, kernel, which, flops, is_masked, sizes)


def _blockwise(program: Program, loop: Instruction) -> AttentionKernelCall | None:
    flops, opcodes = 0.0, set()
    for times, computation, instruction in _inside(program, loop):
        opcodes.add(instruction.opcode.removesuffix("-start"))
        if instruction.opcode == "dot":
            flops += times * matrix_product(computation, instruction, instruction.attributes["lhs_contracting_dims"])[0]
    if flops == 0 or opcodes & set(COLLECTIVES):
        return None
    is_masked = "conditional" in opcodes  # tiles in which nobody sees anything are skipped
    return AttentionKernelCall(loop, "blockwise", pass_of(loop.op_name), flops, is_masked, sizes=None)


def _inside(program: Program, loop: Instruction) -> Iterator[tuple[int, Computation, Instruction]]:
    """All that a loop runs, with how often in one run of it."""
    rounds = trip_count(program, loop)
    for name in loop.called:
        for instruction in program.computations[name]:
            yield rounds, program.computations[name], instruction
            for times, computation, inner in _called(program, instruction):
                yield rounds * times, computation, inner


def _called(program: Program, instruction: Instruction) -> Iterator[tuple[int, Computation, Instruction]]:
    if instruction.opcode == "while":
        yield from _inside(program, instruction)
        return
    for name in instruction.called:
        for inner in program.computations[name]:
            yield 1, program.computations[name], inner
            yield from _called(program, inner)
