"""Validation and measurements on one GPU, from a checkout without installation; see benchmarks/gpu_suite.py.

python scripts/gpu_suite.py > suite.json
python scripts/gpu_suite.py --dry_run
"""

import sys
from pathlib import Path

from absl import app

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu_suite  # noqa: E402

if __name__ == "__main__":
    gpu_suite.define_flags()
    app.run(gpu_suite.main)
