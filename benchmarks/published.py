"""Published training speeds of `published_runs.toml`, and the steps of jaxlc that they are compared
with.
"""

import dataclasses
import gzip
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.causal_work import full_pairs
from jaxlc.config import Config, defaults, load
from jaxlc.hlo import AnalyzedProgram, analyze
from jaxlc.plan.program import compile_step
from jaxlc.simulate.timeline import Prediction
from jaxlc.simulate.topology import Topology, make_mesh, topology
from jaxlc.step.step import build_step

Unit = Literal["tokens/s per GPU", "TFLOP/s per GPU, full attention", "% MFU, causal", "s per step"]

_DATA = Path(__file__).parent / "published_runs.toml"
_COMMON = {
    "model.preset": "llama3.1-8b",
    "attention.document_mask": False,
    "attention.kernel": "cudnn",
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


def runs() -> tuple[PublishedRun, ...]:
    """All runs, in the order of the file."""
    return tuple(PublishedRun(**values) for values in _read()["runs"])


def program(run: PublishedRun, directory: Path | None = None) -> AnalyzedProgram:
    """The step of `run`, AOT-compiled.

    Args:
      directory: where compiled programs are kept as text; a program in it is not compiled again. None: nowhere.
    """
    path = directory / f"{run.key}.hlo.gz" if directory else None
    if path is not None and path.exists():
        return analyze(gzip.decompress(path.read_bytes()).decode())
    config = run.config
    text = compile_step(
        build_step(config, make_mesh(topology(run.topology), config.mesh))
    ).compiled.as_text()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    return analyze(text)


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


def _read() -> dict[str, Any]:
    return tomllib.loads(_DATA.read_text())
