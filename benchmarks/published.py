"""Published training speeds of `published_runs.toml`, and the steps of jaxlc that they are compared
with; `measured_runs.toml` has measured steps of jaxlc in the same form.
"""

import dataclasses
import gzip
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.causal_work import full_pairs
from jaxlc.config import Config, defaults, load
from jaxlc.hlo import AnalyzedProgram, analyze
from jaxlc.plan.packing_estimates import mix_of_lengths
from jaxlc.plan.program import compile_step
from jaxlc.simulate.packed_work import sequence_work
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.timeline import Prediction
from jaxlc.simulate.topology import Topology, make_mesh, topology
from jaxlc.step.step import TrainStep, build_step

Unit = Literal["tokens/s per GPU", "TFLOP/s per GPU, full attention", "% MFU, causal", "s per step"]

_DATA = Path(__file__).parent / "published_runs.toml"
MEASURED = Path(__file__).parent / "measured_runs.toml"
_COMMON = {
    "model.preset": "llama3.1-8b",
    "attention.document_mask": False,
    "attention.kernel": "cudnn",
    "memory.loss_chunk_tokens": 1024,  # of the stored estimates
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where figures are printed. Fields as in published_runs.toml."""

    publisher: str
    url: str
    date: str
    commit: str  # of the page's repository; "" if it has none
    hardware: str


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A published measurement, and the settings of the most similar step of jaxlc."""

    source: str  # a key of `sources()`
    name: str
    where: str  # in the source: table, row
    figure: float
    unit: Unit
    published: str  # the configuration as printed in the source
    assumed: list[str]  # settings that the source does not print, or that jaxlc cannot reproduce
    topology: str
    settings: Mapping[str, Any]  # in addition to _COMMON
    # fields of the GPU that differ
    device: Mapping[str, float] = dataclasses.field(default_factory=dict)
    mix: bool = False  # packed documents of random lengths instead of one document per sequence

    @property
    def key(self) -> str:
        """Unique among all runs; usable as the name of a file."""
        return "".join(
            char if char.isalnum() else "-" for char in f"{self.source} {self.name}".lower()
        )

    @property
    def gpus(self) -> Topology:
        gpus = topology(self.topology)
        return dataclasses.replace(gpus, device=dataclasses.replace(gpus.device, **self.device))

    @property
    def config(self) -> Config:
        """The config of the compiled step."""
        config = defaults()
        config.update_from_flattened_dict({**_COMMON, **self.settings})
        # evaluation is not part of the step
        config.train.eval_sequences = config.mesh.data * config.mesh.fsdp
        return load(config)


def sources() -> dict[str, Source]:
    """The sources by name."""
    return {name: Source(**values) for name, values in _read()["sources"].items()}


def runs(path: Path = _DATA) -> tuple[PublishedRun, ...]:
    """All runs, in the order of the file: the published ones, or the steps in `MEASURED`."""
    return tuple(PublishedRun(**values) for values in _read(path)["runs"])


def program(run: PublishedRun, directory: Path | None = None) -> AnalyzedProgram:
    """The step of `run`, AOT-compiled.

    Args:
      directory: where compiled programs are kept as text; a program in it is not compiled again. None: nowhere.
    """
    path = directory / f"{run.key}.hlo.gz" if directory else None
    if path is not None and path.exists():
        return analyze(gzip.decompress(path.read_bytes()).decode())
    text = compile_step(_step(run)).compiled.as_text()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    return analyze(text)


def time_model(run: PublishedRun) -> TimeModel:
    """For `run`, whose sequences are one document or the documents of a first contact."""
    if not run.mix:
        return TimeModel(run.gpus, run.config)
    order = _step(run).sequence_order
    lengths = mix_of_lengths(np.random.default_rng(0), run.config.data.seq_len).tolist()
    work = sequence_work(run.config, order.of, lengths, few_documents=order.few_documents).work
    return TimeModel(run.gpus, run.config, work=work)


def _step(run: PublishedRun) -> TrainStep:
    config = run.config
    return build_step(config, make_mesh(topology(run.topology), config.mesh))


def estimated_figure(run: PublishedRun, prediction: Prediction) -> float:
    """The estimate in the unit of the published figure."""
    config = run.config
    if run.unit == "tokens/s per GPU":
        return prediction.tokens_per_second_per_device
    if run.unit == "% MFU, causal":
        return 100 * prediction.mfu_causal
    if run.unit == "s per step":
        return prediction.step_seconds
    pairs = config.train.global_batch_size * full_pairs(config.model, config.data.seq_len)
    return config.step_flops(pairs).total / prediction.step_seconds / run.gpus.num_gpus / 1e12


def time_ratio(run: PublishedRun, prediction: Prediction) -> float:
    """Published time over estimated time; above 1 if the estimate is too fast."""
    figure = estimated_figure(run, prediction)
    return run.figure / figure if run.unit == "s per step" else figure / run.figure


def _read(path: Path = _DATA) -> dict[str, Any]:
    return tomllib.loads(path.read_text())
