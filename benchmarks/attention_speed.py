"""Many attention measurements: a row each as it is done, a table at the end, and a picture over sequence lengths."""

import json
from itertools import product
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import ringattention
from benchmarks.attention_contestants import Case, Contestant, prepare, prepare_function
from jaxlc.config import MeshConfig
from jaxlc.core.errors import UserError
from jaxlc.sharding.mesh import make_mesh
from jaxlc.sweep.timing import environment_info, interleaved_seconds

CONTESTANT = "ringattention"  # the package, in place of a strategy of ours


def cases(strategies: list[str], lengths: list[int], **settings) -> list[Case]:
    """Every strategy at every length."""
    return [Case(strategy=name, seq_len=n, **settings) for n, name in product(lengths, strategies)]


def run(cases: list[Case], mesh_config: MeshConfig, repeats: int, out: Path) -> list[dict]:
    """Measures, those of a length in turn; prints, and writes out/attention.jsonl and out/attention.png.

    Raises:
      UserError: fewer devices than the mesh has, or a contestant that is not installed.
    """
    if len(jax.devices()) < mesh_config.num_devices:
        raise UserError(f"the mesh needs {mesh_config.num_devices} devices and there are {len(jax.devices())}")
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    out.mkdir(parents=True, exist_ok=True)
    console, rows = Console(), []
    with (out / "attention.jsonl").open("a") as file:
        lengths = dict.fromkeys(case.seq_len for case in cases)
        for num_tokens in track(lengths, "measuring", console=console, transient=True):
            contestants = [_prepare(case, mesh) for case in cases if case.seq_len == num_tokens]
            seconds = interleaved_seconds([each.call for each in contestants], repeats)
            new = [each.row(its_seconds) | environment_info() for each, its_seconds in zip(contestants, seconds)]
            file.writelines(json.dumps(row) + "\n" for row in new)
            file.flush()
            rows += new
    console.print(_table(rows))
    _plot(rows, out / "attention.png")
    console.print(f"{out / 'attention.jsonl'}, {out / 'attention.png'}", highlight=False)
    return rows


def _prepare(case: Case, mesh: Mesh) -> Contestant:
    if case.strategy == CONTESTANT:
        chunk_tokens = min(512, case.seq_len // mesh.size)
        return prepare_function(case, mesh, ringattention.make(mesh, chunk_tokens))
    return prepare(case, mesh)


def _table(rows: list[dict]) -> Table:
    first = rows[0]
    what = "forward + backward" if first["backward"] else "forward"
    table = Table(
        title=f"{what}, {first['num_heads']} heads of {first['head_dim']} ({first['num_kv_heads']} key/value),"
        f" {first['dtype']}, {first['mesh'] or 'one device'}",
        caption=f"{first['device']}, jax {first['jax']}, {first['commit']}; median of the calls; causal FLOPs",
    )
    for heading in ("tokens", "strategy", "ms", "min ms", "TFLOP/s", "of peak", "temp MiB/device"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for row in rows:
        share = row["share_of_peak"]
        table.add_row(
            f"{row['seq_len']:,}",
            row["strategy"],
            f"{1e3 * row['seconds']:,.1f}",
            f"{1e3 * row['seconds_min']:,.1f}",
            f"{row['tflops']:.3g}",
            "" if share is None else f"{share:.1%}",
            f"{row['temp_bytes'] / 2**20:,.1f}",
        )
    return table


def _plot(rows: list[dict], path: Path) -> None:
    """TFLOP/s over sequence length, a line a strategy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        points = [(row["seq_len"], row["tflops"]) for row in rows if row["strategy"] == strategy]
        axes.plot(*zip(*points), "o-", label=strategy)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens", ylabel="TFLOP/s, causal, all devices", title="Attention by sequence length")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
