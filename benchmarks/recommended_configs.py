"""Recommended configurations for models, sequence lengths and numbers of H100s: tables and figure of a docs page.

    python -m benchmarks.recommended_configs --out=runs/recommendations
    python -m benchmarks.recommended_configs --compile=llama3.1-8b@h100:1x8,llama3.1-8b@h100:8x8

Prints the tables of docs/recommended_configs.md and writes its figure. Cells of the models and GPUs in --compile are
AOT-compiled, others are estimated by the formulas of `jaxlc plan --recommend`. Compiled steps are stored, together
with those of `benchmarks.recommendations`; the same command resumes.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import app, flags
from matplotlib.figure import Figure

from benchmarks.recommendations import StoredCompiler
from jaxlc.config import Config, load, with_settings
from jaxlc.config.base_config import base_config
from jaxlc.search.candidate_search import Search
from jaxlc.search.candidates import Candidate, layouts
from jaxlc.search.recommendation import MEMORY_MARGIN
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import topology

MODELS = ("llama3.2-1b", "llama3.1-8b", "llama3.1-70b")
LENGTHS = ("32K", "128K", "512K", "1M", "4M")
TOPOLOGIES = ("h100:1x1", "h100:1x8", "h100:8x8", "h100:32x8")
FIGURE = "recommended_configs.png"


class Cell(NamedTuple):
    """The best configuration of a model, length and GPUs; `candidate` is None if nothing fits."""

    model: str
    length: str
    topology: str
    candidate: Candidate | None
    step_seconds: float
    device_bytes: float
    host_bytes_per_node: float
    is_compiled: bool

    @property
    def tokens_per_second(self) -> float:
        """Per GPU."""
        assert self.candidate is not None
        return self.candidate.config.tokens_per_step / self.step_seconds / self.candidate.gpus.num_gpus


def config_of(model: str, length: str) -> Config:
    """One document per sequence, 4,194,304 tokens a step."""
    config = base_config(None, dict(model=model, seq_len=length))
    assert config is not None
    return with_settings(load(config), {"attention.document_mask": False})


def cell(model: str, length: str, gpus: str, compiler: StoredCompiler | None) -> Cell:
    """The best configuration by the formulas, or the best compiled one.

    Args:
      compiler: None: nothing is compiled, and the memory formula must leave its margin free.
    """
    config, target = config_of(model, length), topology(gpus)
    margin = MEMORY_MARGIN if compiler else 1 / MEMORY_MARGIN
    pool = [layout for layout in layouts(config, target, Roofline(), margin) if layout.candidates]
    pool.sort(key=lambda layout: layout.candidates[0].time.step_seconds)
    if not pool:
        return Cell(model, length, gpus, None, 0.0, 0.0, 0.0, False)
    if compiler is None:
        best = pool[0].candidates[0]
        memory = best.memory
        return Cell(
            model, length, gpus, best, best.time.step_seconds, memory.device_bytes, memory.host_bytes_per_node, False
        )
    search = Search(base=config, goal="fastest", num_best=1)
    log = lambda line: print(f"  {line}", file=sys.stderr, flush=True)
    search.run(pool, compiler, batch_size=1, limit_seconds=0, log=log)
    if not search.best:
        return Cell(model, length, gpus, None, 0.0, 0.0, 0.0, True)
    (trial,) = search.best
    memory = trial.plan.memory
    seconds = trial.plan.predicted.step_seconds
    peak, on_host = memory.device_peak_bytes, memory.host_bytes_per_node + memory.staging_bytes_per_node
    return Cell(model, length, gpus, trial.candidate, seconds, peak, on_host, True)


def tables(cells: Sequence[Cell]) -> str:
    """Markdown: a table for each model, without the cells in which nothing fits."""
    heads = ("length", "GPUs", "configuration", "s per step", "tokens/s per GPU", "GiB per GPU", "host GiB per node")
    lines = []
    for model in MODELS:
        lines += ["", f"## {model}", "", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
        for one in cells:
            if one.model != model or one.candidate is None:
                continue
            texts = (
                one.length,
                f"{one.candidate.gpus.num_gpus}",
                f"{'' if one.is_compiled else '~'}`{one.candidate.name}`",
                f"{one.step_seconds:,.{0 if one.step_seconds >= 1000 else 2}f}",
                f"{one.tokens_per_second:,.0f}",
                f"{one.device_bytes / 2**30:,.1f}",
                f"{one.host_bytes_per_node / 2**30:,.0f}",
            )
            lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines[1:])


def figure(cells: Sequence[Cell]) -> Figure:
    """A panel for each model: length over GPUs, with tokens/s per GPU and the mesh in each cell."""
    result = Figure(figsize=(12.5, 4.4), dpi=130, layout="constrained")
    panels = result.subplots(1, len(MODELS), sharey=True)
    for panel, model in zip(panels, MODELS, strict=True):
        of_model = [one for one in cells if one.model == model]
        fastest = max((one.tokens_per_second for one in of_model if one.candidate), default=1.0)
        for one in of_model:
            x, y = TOPOLOGIES.index(one.topology), LENGTHS.index(one.length)
            share = one.tokens_per_second / fastest if one.candidate else 0.0
            color = (0.16, 0.61, 0.56, 0.12 + 0.6 * share) if one.candidate else (0.5, 0.5, 0.5, 0.12)
            panel.add_patch(_square(x, y, color))
            panel.text(x, y, _cell_text(one), ha="center", va="center", fontsize=6.5)
        panel.set_xlim(-0.5, len(TOPOLOGIES) - 0.5)
        panel.set_ylim(-0.5, len(LENGTHS) - 0.5)
        panel.set_xticks(range(len(TOPOLOGIES)), [str(topology(name).num_gpus) for name in TOPOLOGIES])
        panel.set_yticks(range(len(LENGTHS)), LENGTHS)
        panel.set_title(model, loc="left", fontsize=10)
        panel.set_xlabel("H100s with 80 GB, 8 per node with 2 TiB")
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0)
    panels[0].set_ylabel("sequence length, tokens")
    return result


def _square(x: float, y: float, color: tuple[float, ...]):
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, facecolor=color, edgecolor="none")


def _cell_text(one: Cell) -> str:
    if one.candidate is None:
        return "does not fit"
    config = one.candidate.config
    letters = {"data": "D", "fsdp": "F", "context": "C", "tensor": "T"}
    mesh = " ".join(f"{letters[axis]}{size}" for axis, size in vars(config.mesh).items() if size > 1) or "1 GPU"
    strategy = f"\n{config.attention.strategy}" if config.mesh.context > 1 else ""
    memory = config.memory
    offloads = memory.offload or memory.optimizer == "host"
    settings = f"{memory.remat}{'+host' if offloads else ''}{'+tiles' if memory.tile_tokens else ''}"
    mark = "" if one.is_compiled else "~"
    return f"{mark}{one.tokens_per_second:,.0f}\n{mesh}{strategy}\n{settings}"


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    flags.DEFINE_list("compile", [], "MODEL@TOPOLOGY of cells that are AOT-compiled", flag_values=values)
    flags.DEFINE_string("out", "runs/recommendations", "directory of stored points and figure", flag_values=values)


def main(_) -> None:
    values = flags.FLAGS
    compiler = StoredCompiler(values.out)
    cells = []
    for model in MODELS:
        for length in LENGTHS:
            for gpus in TOPOLOGIES:
                print(f"{model}, {length}, {gpus}", file=sys.stderr, flush=True)
                cells.append(cell(model, length, gpus, compiler if f"{model}@{gpus}" in values.compile else None))
    print(tables(cells))
    figure(cells).savefig(Path(values.out) / FIGURE)


if __name__ == "__main__":
    define_flags()
    app.run(main)
