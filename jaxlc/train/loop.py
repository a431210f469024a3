"""The trainer, read top to bottom: config, mesh, step, corpus, state, loop."""

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxlc import attention, runtime
from jaxlc.config import Config, load, to_dict
from jaxlc.core.axes import CONTEXT
from jaxlc.core.errors import UserError
from jaxlc.core.flops import training_flops
from jaxlc.data.loader import Corpus, batches, open_corpus
from jaxlc.data.ngrams import ngram_losses
from jaxlc.sharding.layout import zigzag_order
from jaxlc.sharding.mesh import make_mesh
from jaxlc.sharding.report import sharding_table
from jaxlc.train import plots
from jaxlc.train.checkpoint import Checkpoints, prepare_workdir
from jaxlc.train.evaluation import Evaluator
from jaxlc.train.metrics import MetricsLog, read_rows
from jaxlc.train.progress import Progress
from jaxlc.train.state import TrainState
from jaxlc.train.step import BATCH_SPEC, Batch, StepMetrics, TrainStep, build_step
