"""Which instructions of a compiled program run as GPU kernels: reads the thunks that XLA writes with `xla_dump_to`.

A thunk is a command of the executable: a kernel, a copy by a copy engine, a collective, a loop. The HLO text does not
say which of them an instruction becomes. A slice of an array in host memory, for example, is a copy if XLA knows its
offset, and otherwise a kernel whose threads read host memory. `*thunk_sequence.txt` lists the commands:

    070: kAsyncStart   [...] stream=computation_stream[2], async_id=1
        069: kCopy [...]

What a command runs, asynchronously or with other offsets, is indented below it. `*thunk_metadata.txt` has the
instruction of each number:

    thunk_metadata {
      thunk_info { profile_annotation: "dynamic-slice-start.55" thunk_id: 70 }
      thunk_kind: "kAsyncStart"
    }

JAX 0.10.1, 0.11.2 and 0.12.0.1 write both files in this form.
"""

import re
from collections.abc import Mapping

_COMMAND = re.compile(r"^( *)(\d+): (k\w+)", re.MULTILINE)
_INSTRUCTION = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')
_WRAPPERS = ("kAsyncStart", "kDynamicSliceFusion")  # wrappers of the command below them
_KERNELS = ("kKernel", "kCustomKernel")

Thunks = Mapping[str, str]  # name of an instruction -> kind of its thunk, as XLA names it: "kCopy", "kCustomKernel"


def parse_thunks(sequence: str, metadata: str) -> Thunks:
    """The kind of the thunk of each instruction; of one that wraps another thunk, the kind of that.

    Args:
      sequence: contents of `*thunk_sequence.txt`.
      metadata: contents of `*thunk_metadata.txt`.
    """
    instruction_of = {int(number): name for name, number in _INSTRUCTION.findall(metadata)}
    commands = [(len(indent), int(number), kind) for indent, number, kind in _COMMAND.findall(sequence)]
    kinds: dict[str, str] = {}
    below_depth, below_kind = 0, ""
    for depth, number, kind in reversed(commands):
        if kind in _WRAPPERS and below_depth > depth:
            kind = below_kind
        below_depth, below_kind = depth, kind
        if number in instruction_of:
            kinds[instruction_of[number]] = kind
    return kinds


def is_kernel(kind: str) -> bool:
    """Whether a thunk of this kind runs on the GPU's multiprocessors."""
    return kind in _KERNELS
