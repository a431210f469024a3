"""Runs at the start of each Python process whose PYTHONPATH has this directory."""

import gc
import os
import sys

gc.disable()  # a sixth of the CPU time of a run of a few steps, as in tests/conftest.py
# The plots of a run take a CPU second (tests/train/runs.py); runs without matplotlib write none.
if "JAXLC_WITHOUT_MATPLOTLIB" in os.environ:
    sys.modules["matplotlib"] = None  # type: ignore
