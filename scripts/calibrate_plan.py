"""Predicted step times against published ones: compiles a step for each published run, for GPUs that are not here.

python scripts/calibrate_plan.py > docs/calibration.md
"""

import os
import sys

from absl import app

from jaxlc import runtime
from jaxlc.config import RuntimeConfig
from jaxlc.core.errors import UserError


def main(_) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # where there is a GPU, too
    runtime.start(RuntimeConfig())
    from benchmarks import calibration

    try:
        print(calibration.page("python scripts/calibrate_plan.py"), end="")
    except UserError as error:
        sys.exit(f"calibrate_plan: {error}")


if __name__ == "__main__":
    app.run(main)
