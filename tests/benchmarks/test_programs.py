"""The command lines of the benchmark programs."""

import importlib

import pytest
from absl import flags

PROGRAMS = (
    "attention_overlap",
    "attention_speed",
    "cpu_comparison",
    "document_balance",
    "gpu_comparison",
    "memory_ladder",
    "notebook_data",
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_define_flags_has_help_and_valid_defaults(name):
    values = flags.FlagValues()
    importlib.import_module(f"benchmarks.{name}").define_flags(values)
    values([name])
    assert len(values) > 0 and all(values[flag].help for flag in values)
