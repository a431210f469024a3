"""One command for a machine with one NVIDIA GPU: prints one JSON object of figures, under 8 minutes.

python scripts/gpu_suite.py > suite.json
python scripts/gpu_suite.py --dry_run        # the same code on small shapes, on any device
"""

import json

from absl import app, flags

from jaxlc import runtime
from jaxlc.config import RuntimeConfig

_DRY_RUN = flags.DEFINE_bool("dry_run", False, "small shapes: shows that everything runs")


def main(_) -> None:
    runtime.start(RuntimeConfig())
    from benchmarks import gpu_suite

    print(json.dumps(gpu_suite.run(gpu_suite.DRY_RUN if _DRY_RUN.value else gpu_suite.Sizes()), indent=1))


if __name__ == "__main__":
    app.run(main)
