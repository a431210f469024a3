"""Runs at the start of each Python process whose PYTHONPATH has this directory."""

import gc

gc.disable()  # a sixth of the CPU time of a run of a few steps, as in tests/conftest.py
