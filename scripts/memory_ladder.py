"""Memory settings in turn, beside other trainers, and the longest rows that fit: compiles for GPUs that are not here.

    python scripts/memory_ladder.py                                   # the tables and the picture of docs/memory.md
    python scripts/memory_ladder.py --tables=longest --gpus=1,8

Started again it goes on where it was: out/points.jsonl has a row for each step that was compiled.
"""

import sys
from pathlib import Path

from absl import app, flags

from jaxlc.core.errors import UserError

_TABLES = flags.DEFINE_list("tables", ["rungs", "baselines", "longest"], "which of these")
_GPUS = flags.DEFINE_list("gpus", ["1", "2", "4", "8", "16", "32"], "of the longest rows: 1, 2, 4, or whole nodes of 8")
_OUT = flags.DEFINE_string("out", "runs/memory_ladder", "directory for rows and the picture")


def main(_) -> None:
    from benchmarks import memory_ladder, memory_ladder_page

    try:
        memory_ladder.start()
        memory_ladder_page.write(_TABLES.value, memory_ladder.numbers_of_gpus(_GPUS.value), Path(_OUT.value))
    except UserError as error:
        sys.exit(f"memory_ladder: {error}")


if __name__ == "__main__":
    app.run(main)
