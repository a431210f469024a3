"""The loads of all experts over a run, in WORKDIR/expert_loads.jsonl, for the picture at the end of the run."""

import json
import math
from pathlib import Path

import numpy as np

from jaxlc.core.errors import UserError
from jaxlc.core.foreign_files import parse_json

LOADS_FILE = "expert_loads.jsonl"
_MAX_ROWS = 32  # of a run; a row has as many numbers as the model has experts, over all layers


def is_recorded(step: int, every: int, end_step: int) -> bool:
    """Whether the loads of a step are written: a function of the step, so a resumed run writes the same rows.

    Args:
      every: steps between two rows of metrics.
      end_step: the last step.
    """
    interval = max(every, math.ceil(end_step / _MAX_ROWS))
    return step == end_step or (step - 1) // interval != (step - 1 - every) // interval


def write_loads(workdir: Path, step: int, load_LE: np.ndarray) -> None:
    """Appends the loads of a step, as multiples of the mean load of the experts of a layer."""
    loads = [[float(f"{load:.4g}") for load in load_E] for load_E in load_LE]
    with (workdir / LOADS_FILE).open("a") as file:
        file.write(json.dumps(dict(step=step, loads=loads)) + "\n")


def read_loads(workdir: Path) -> dict[int, np.ndarray]:
    """Step -> load_LE, in the order of the steps; empty without a file. A run that was resumed writes steps again.

    Raises:
      UserError: a line, other than a truncated last one, is not such a row.
    """
    path = workdir / LOADS_FILE
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    loads: dict[int, np.ndarray] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            step, load_LE = int(row["step"]), np.array(row["loads"], np.float32)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"line {number} of {path} has no loads of experts: remove that line") from error
        loads = {earlier: x for earlier, x in loads.items() if earlier < step} | {step: load_LE}
    return loads
