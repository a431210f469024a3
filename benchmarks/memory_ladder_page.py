"""The tables of docs/memory.md, as Markdown, and its picture."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure  # not pyplot: it would take over the backend of a notebook

from benchmarks import memory_ladder
from benchmarks.memory_ladder import Baseline, Case, Longest
from jaxlc.core.errors import UserError
from jaxlc.sweep.worker import Row

TABLES = ("rungs", "baselines", "longest")
PICTURE = "memory_longest.png"
# Longest rows of an 8B Llama on H100s with 80 GB, as their authors report them: DeepSpeed ALST (Bekman et al. 2025,
# arXiv:2506.13996), UPipe, and TRL (Qwen3 8B). (GPUs, tokens).
RECORDS = {
    "ALST": ((1, 500_000), (8, 3_700_000), (32, 15_000_000)),
    "UPipe": ((8, 5_000_000),),
    "TRL": ((8, 1_048_576),),
}
_COLORS = {"ALST": "#d1495b", "UPipe": "#2a9d8f", "TRL": "#e9a23b"}
_OURS, _FAINT = "#1f5fa8", "#dde1e6"


def write(tables: Sequence[str], num_gpus: Sequence[int], out: Path) -> None:
    """Compiles what is not in out/points.jsonl yet, prints the tables and writes the picture.

    Args:
      tables: of TABLES.
      num_gpus: for the longest rows.
    Raises:
      UserError: there is no such table.
    """
    for name in tables:
        if name not in TABLES:
            raise UserError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
    if "rungs" in tables:
        cases = memory_ladder.rungs()
        print(*rungs_table(cases, memory_ladder.compile_cases(cases, out)), "", sep="\n")
    if "baselines" in tables:
        baselines = memory_ladder.baselines()
        rows = memory_ladder.compile_cases([case for rival in baselines for case in rival.ours], out)
        print(*rivals_table(baselines, rows), "", sep="\n")
    if "longest" in tables:
        plan = lambda case: memory_ladder.compile_cases([case], out)[0]
        found = {number: memory_ladder.longest(number, plan) for number in num_gpus}
        print(*longest_table(found), sep="\n")
        plot_longest(found, out / PICTURE)


def rungs_table(cases: Sequence[Case], rows: Sequence[Row]) -> Iterator[str]:
    yield from _head("settings", "device GiB", "of which compiled", "host GiB per node", "s per step",
                     "exposed host copies, s", "extra FLOPs")  # fmt: skip
    for case, row in zip(cases, rows, strict=True):
        yield _line(case.name, *_memory(row), *_time(row), f"{row['recomputed_share']:.0%}")


def rivals_table(baselines: Sequence[Baseline], rows: Iterable[Row]) -> Iterator[str]:
    """`rows` are those of all `ours`, one after the other."""
    yield from _head("run", "theirs", "ours", "device GiB", "of which compiled", "host GiB per node",
                     "s per step", "exposed host copies, s")  # fmt: skip
    rows = iter(rows)
    for rival in baselines:
        for case in rival.ours:
            row = next(rows)
            yield _line(rival.name, rival.takes, case.name, *_memory(row), *_time(row))


def longest_table(found: dict[int, Longest]) -> Iterator[str]:
    """`found` is by number of GPUs."""
    yield from _head("GPUs", "sequence length", "`layers_per_remat_group`", "strategy", "device GiB",
                     "of which compiled", "host GiB per node", "staging GiB per node", "hours per step",
                     "bottleneck")  # fmt: skip
    for num_gpus, each in found.items():
        row = each.fits
        yield _line(
            str(num_gpus),
            f"{row['seq_len']:,}",
            str(row["layers_per_remat_group"]),
            row["strategy"] if num_gpus > 1 else "",
            *_memory(row),
            _gib(row["staging_bytes_per_node"]),
            f"{row['step_seconds'] / 3600:,.2f}",
            each.obstacle,
        )


def plot_longest(found: dict[int, Longest], path: Path) -> None:
    """Tokens over GPUs, with the records of others."""
    figure = Figure(figsize=(7.5, 4.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    gpus, tokens = list(found), [each.fits["seq_len"] for each in found.values()]
    axes.plot(gpus, tokens, "o-", color=_OURS, linewidth=1.6, label="jaxlc, AOT-compiled")
    for num_gpus, longest in zip(gpus, tokens, strict=True):
        axes.annotate(_short(longest), (num_gpus, longest), (0, 8), textcoords="offset points", ha="center", fontsize=8)
    for name, points in RECORDS.items():
        axes.plot(*zip(*points, strict=True), "s", color=_COLORS[name], markersize=6, label=f"{name}, reported")
        for point in points:
            axes.annotate(_short(point[1]), point, (8, -3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(gpus, [str(num_gpus) for num_gpus in gpus])
    ticks = [2**power for power in range(19, 27)]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlabel="H100s with 80 GB, 8 a node with 2 TiB", ylabel="sequence length, tokens")
    axes.set_title("Llama 3 8B, full training with AdamW: maximum sequence length", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path)


def _head(*names: str) -> Iterator[str]:
    yield _line(*names)
    yield _line(*("---",) * len(names))


def _line(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def _memory(row: Row) -> tuple[str, str, str]:
    """All that is counted on the GPU, the compiler's own figures of it, and pinned memory."""
    fits = "" if row["fits"] else ", does not fit"
    peak, compiled = row["device_peak_bytes"], row["device_compiled_bytes"]
    return f"{_gib(peak)}{fits}", _gib(compiled), _gib(row["host_bytes_per_node"])


def _time(row: Row) -> tuple[str, str]:
    return f"{row['step_seconds']:,.1f}", f"{row['exposed_host_copy_seconds']:,.1f}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f}"


def _short(tokens: int) -> str:
    """In millions: "33.6M"."""
    return f"{tokens / 1e6:.3g}M"
