"""Training: `run` trains, and `build_step` builds the training step that plan, sweep and benchmarks
use too.
"""

import jaxlc.runtime.stderr  # noqa: F401  imports JAX without the notes of its CUDA plugin
from jaxlc.step.custom_model import Model
from jaxlc.step.language_model import LanguageModel
from jaxlc.step.step import TrainStep, build_step
from jaxlc.train.callbacks import Callback, RunInfo, StopTraining, TrainingStopped
from jaxlc.train.loop import run
from jaxlc.train.reports.metrics import History
from jaxlc.train.result import Result

__all__ = [
    "Callback",
    "History",
    "LanguageModel",
    "Model",
    "Result",
    "RunInfo",
    "StopTraining",
    "TrainStep",
    "TrainingStopped",
    "build_step",
    "run",
]
