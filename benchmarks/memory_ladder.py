"""Prints the tables of docs/memory.md and of 2026-11-21-memory-comparison.md as Markdown; writes a
plot.

    python -m benchmarks.memory_ladder
    python -m benchmarks.memory_ladder --tables=max_seq_len --gpus=1,8

The steps are AOT-compiled for H100s. Compiled steps are stored in points.jsonl; the same command
resumes.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from absl import app, flags
from matplotlib.figure import Figure

from benchmarks import memory_cases
from benchmarks.memory_cases import Baseline, Case, MaxSeqLen
from jaxlc.core.errors import UserError
from jaxlc.core.processes import Row

TABLES = ("ablation", "baselines", "max_seq_len")
PLOT = "memory_longest.png"
# Maximum sequence lengths of an 8B Llama on H100s with 80 GB, as reported by DeepSpeed ALST (Bekman et al. 2025,
# arXiv:2506.13996), UPipe, and TRL (Qwen3 8B): (GPUs, tokens).
REPORTED = {
    "ALST": ((1, 500_000), (8, 3_700_000), (32, 15_000_000)),
    "UPipe": ((8, 5_000_000),),
    "TRL": ((8, 1_048_576),),
}
_COLORS = {"ALST": "#d1495b", "UPipe": "#2a9d8f", "TRL": "#e9a23b"}
_JAXLC_COLOR, _GRID_COLOR = "#1f5fa8", "#dde1e6"


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    flags.DEFINE_list("tables", list(TABLES), "tables to print", flag_values=values)
    gpus = ["1", "2", "4", "8", "16", "32"]
    flags.DEFINE_list(
        "gpus",
        gpus,
        "numbers of GPUs for max_seq_len: 1, 2, 4, or multiples of 8",
        flag_values=values,
    )
    flags.DEFINE_string(
        "out", "runs/memory_ladder", "directory of points.jsonl and the plot", flag_values=values
    )


def main(_) -> None:
    values = flags.FLAGS
    try:
        memory_cases.start()
        write(values.tables, memory_cases.parse_num_gpus(values.gpus), Path(values.out))
    except (UserError, KeyboardInterrupt) as error:
        sys.exit(f"error: {error}")


def write(tables: Sequence[str], num_gpus: Sequence[int], out: Path) -> None:
    """Compiles the steps that are not in out/points.jsonl, prints the tables and writes the plot.

    Args:
      tables: names from TABLES.
      num_gpus: numbers of GPUs of the table max_seq_len.
    Raises:
      UserError: an unknown table, or a step that does not compile.
    """
    for name in tables:
        if name not in TABLES:
            raise UserError(f"invalid {name!r} for --tables: expected {', '.join(TABLES)}")
    if "ablation" in tables:
        cases = memory_cases.ablation()
        print(*ablation_table(cases, memory_cases.compile_cases(cases, out)), "", sep="\n")
    if "baselines" in tables:
        baselines = memory_cases.baselines()
        rows = memory_cases.compile_cases(
            [case for baseline in baselines for case in baseline.ours], out
        )
        print(*baselines_table(baselines, rows), "", sep="\n")
    if "max_seq_len" in tables:
        plan = lambda case: memory_cases.compile_cases([case], out)[0]
        results = {number: memory_cases.max_seq_len(number, plan) for number in num_gpus}
        print(*max_seq_len_table(results), sep="\n")
        plot_max_seq_len(results, out / PLOT)


def ablation_table(cases: Sequence[Case], rows: Sequence[Row]) -> Iterator[str]:
    yield from _head("settings", "device GiB", "of which compiled", "host GiB per node", "s per step",
                     "exposed host copies, s", "extra FLOPs")  # fmt: skip
    for case, row in zip(cases, rows, strict=True):
        yield _line(case.name, *_memory(row), *_time(row), f"{row['recomputed_share']:.0%}")


def baselines_table(baselines: Sequence[Baseline], rows: Iterable[Row]) -> Iterator[str]:
    """The table of baselines. `rows` are the rows of all cases `ours`, in order."""
    yield from _head("run", "theirs", "ours", "device GiB", "of which compiled", "host GiB per node",
                     "s per step", "exposed host copies, s")  # fmt: skip
    rows = iter(rows)
    for baseline in baselines:
        for case in baseline.ours:
            row = next(rows)
            yield _line(baseline.name, baseline.reported, case.name, *_memory(row), *_time(row))


def max_seq_len_table(results: dict[int, MaxSeqLen]) -> Iterator[str]:
    """The table of maximum sequence lengths. `results` are keyed by the number of GPUs."""
    yield from _head("GPUs", "sequence length", "`layers_per_remat_group`", "strategy", "device GiB",
                     "of which compiled", "host GiB per node", "staging GiB per node", "hours per step",
                     "bottleneck")  # fmt: skip
    for num_gpus, result in results.items():
        row = result.fits
        yield _line(
            str(num_gpus),
            f"{row['seq_len']:,}",
            str(row["layers_per_remat_group"]),
            row["strategy"] if num_gpus > 1 else "",
            *_memory(row),
            _gib(row["staging_bytes_per_node"]),
            _median(row, unit_seconds=3600),
            result.bottleneck,
        )


def plot_max_seq_len(results: dict[int, MaxSeqLen], path: Path) -> None:
    """Maximum sequence length over the number of GPUs, with the lengths that others report."""
    figure = Figure(figsize=(7.5, 4.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    gpus, tokens = list(results), [result.fits["seq_len"] for result in results.values()]
    axes.plot(gpus, tokens, "o-", color=_JAXLC_COLOR, linewidth=1.6, label="jaxlc, AOT-compiled")
    for num_gpus, seq_len in zip(gpus, tokens, strict=True):
        axes.annotate(
            _short(seq_len),
            (num_gpus, seq_len),
            (0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    for name, points in REPORTED.items():
        axes.plot(
            *zip(*points, strict=True),
            "s",
            color=_COLORS[name],
            markersize=6,
            label=f"{name}, reported",
        )
        for point in points:
            axes.annotate(_short(point[1]), point, (8, -3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(gpus, [str(num_gpus) for num_gpus in gpus])
    ticks = [2**power for power in range(19, 27)]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlabel="H100s with 80 GB, 8 per node with 2 TiB", ylabel="sequence length, tokens")
    axes.set_title(
        "Llama 3.1 8B, full training with AdamW: maximum sequence length", loc="left", fontsize=10
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=_GRID_COLOR, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path)


def _head(*names: str) -> Iterator[str]:
    yield _line(*names)
    yield _line(*("---",) * len(names))


def _line(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def _memory(row: Row) -> tuple[str, str, str]:
    """Peak GPU memory, the part of it that the compiler reports, and pinned host memory per node."""
    fits = "" if row["fits"] else ", does not fit"
    peak, compiled = row["device_peak_bytes"], row["device_compiled_bytes"]
    return f"{_gib(peak)}{fits}", _gib(compiled), _gib(row["host_bytes_per_node"])


def _time(row: Row) -> tuple[str, str]:
    return _median(row), _median(row, "exposed_host_copy_seconds")


def _median(row: Row, name: str = "step_seconds", unit_seconds: float = 1.0) -> str:
    """The median of an estimated time, with two significant digits."""
    factor = math.sqrt(row["step_seconds_low"] * row["step_seconds_high"]) / row["step_seconds"]
    return f"{float(f'{factor * row[name] / unit_seconds:.1e}'):,g}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f}"


def _short(tokens: int) -> str:
    """33_554_432 -> "33.6M"."""
    return f"{tokens / 1e6:.3g}M"


if __name__ == "__main__":
    define_flags()
    app.run(main)
