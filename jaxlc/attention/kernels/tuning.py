"""Tuning parameters of the Pallas kernels: block sizes, warps, pipeline stages.

The values were chosen for an H100 from the register and shared memory use that its compiler reports (docs/log.md). They
were timed on one (benchmarks/2026-11-26-h100.md); other values were not.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TuningParams:
    """How one kernel is launched."""

    query_block_tokens: int
    kv_block_tokens: int
    num_warps: int
    num_stages: int  # blocks in flight between global and shared memory


_HALF_PRECISION = {
    "flash_forward": TuningParams(query_block_tokens=128, kv_block_tokens=128, num_warps=8, num_stages=2),
    "flash_dq": TuningParams(query_block_tokens=128, kv_block_tokens=128, num_warps=8, num_stages=2),
    "flash_dkv": TuningParams(query_block_tokens=64, kv_block_tokens=128, num_warps=8, num_stages=2),
}
# Operands of twice the size, multiplied without tensor cores.
_FLOAT32 = TuningParams(query_block_tokens=32, kv_block_tokens=32, num_warps=4, num_stages=1)

MIN_BLOCK_TOKENS = 16  # the smallest dimension of a matrix product in Triton
MAX_HEAD_DIM = 128  # a block with a larger head dim does not fit into the registers
MAX_BLOCK_RANGES = 8  # ranges in the list of blocks that a program loops over; see block_mask.py


def tuning_params(kernel: str, dtype: str) -> TuningParams:
    """The parameters for a kernel, by its name in this table, and a dtype such as "bfloat16"."""
    return _FLOAT32 if dtype == "float32" else _HALF_PRECISION[kernel]
