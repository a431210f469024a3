"""A recommendation as plain text: up to three meshes to measure, and what their estimates rest on."""

import math
from collections.abc import Iterator, Sequence

from jaxlc.core.counts import gib
from jaxlc.core.text_table import aligned
from jaxlc.runtime.worker_processes import Row
from jaxlc.search import space
from jaxlc.search.best_first import Candidate
from jaxlc.search.ranking import time_interval, two_digits
from jaxlc.search.recommendation import Alternatives, Recommendation
from jaxlc.simulate.interval import PAIR_SPREAD, is_distinguishable


def page(recommendation: Recommendation, price_per_gpu_hour: float | None, pair_spread: float = PAIR_SPREAD) -> str:
    """Plain text.

    Args:
      price_per_gpu_hour: in any currency; None: no cost is printed.
      pair_spread: half of the 80% interval of the logarithm of the ratio of two times.
    """
    config, search = recommendation.base, recommendation.search
    length = "longest sequence" if search.goal == "longest" else f"{config.data.seq_len:,} tokens"
    model, goal = config.model.init_from or config.model.preset, search.goal.replace("_", " ")
    lines = [f"RECOMMENDATION, {goal}: {model}, {length} on {recommendation.gpus}"]
    if recommendation.alternatives is not None:
        return "\n".join([*lines, *_nothing_fits(recommendation, recommendation.alternatives)])
    best = search.best
    lines += [
        "memory is AOT-compiled; time is estimated, with the 80% interval of published runs (docs/calibration.md)"
    ]
    lines += ["", *aligned(_rows([row for _, row in best], price_per_gpu_hour)), ""]
    for rank, (candidate, row) in enumerate(best, start=1):
        lines += _details(rank, candidate, row)
    lines += ["", *_undecided([row for _, row in best], pair_spread)]
    return "\n".join(lines)


def _rows(best: Sequence[Row], price: float | None) -> Iterator[Sequence[str]]:
    heads = ["", "GPUs", "length", "step (80%)", "tokens/s/GPU", "GiB/GPU", "host GiB/node", "GPU-hours per 1B tokens"]
    yield heads if price is None else [*heads, "cost per 1B tokens"]
    for rank, row in enumerate(best, start=1):
        low, median, high = time_interval(row)
        rate = row["tokens_per_second_per_device"] * row["step_seconds"] / median
        gpu_hours = 1e9 / rate / 3600
        cells = [
            str(rank),
            row["topology"],
            f"{row['seq_len']:,}",
            f"{two_digits(median)} s ({two_digits(low)} to {two_digits(high)})",
            two_digits(rate),
            f"{row['device_peak_bytes'] / 2**30:.0f} of {row['device_usable_bytes'] / 2**30:.0f}",
            f"{row['host_bytes_per_node'] / 2**30:,.0f}",
            two_digits(gpu_hours),
        ]
        yield cells if price is None else [*cells, two_digits(price * gpu_hours)]


def _details(rank: int, candidate: Candidate, row: Row) -> Iterator[str]:
    yield f"{rank}: {space.name_of(candidate.config)}"
    left_bytes = row["device_usable_bytes"] - row["device_peak_bytes"]
    yield f"   leaves {left_bytes / 2**30:.0f} GiB per GPU; {space.cost(candidate.config, candidate.settings)}"
    yield f"   share of the time: {row['time_by_resource']}"
    if row["warnings"]:
        yield f"   warning: {row['warnings']}"
    if row["pools"]:
        yield f"   needs {space.overrides(row['pools'])}"


def _undecided(best: Sequence[Row], spread: float) -> Iterator[str]:
    """Which of the configurations the estimate cannot order."""
    first = best[0]
    close = [
        str(rank)
        for rank, row in enumerate(best, start=1)
        if (row["num_devices"], row["seq_len"]) == (first["num_devices"], first["seq_len"])
        and not is_distinguishable(row["step_seconds"], first["step_seconds"], spread)
    ]
    if len(close) > 1:
        names, ratio = " and ".join([", ".join(close[:-1]), close[-1]]), math.expm1(spread)
        yield f"The estimate cannot order {names}: they differ by less than the 80% interval of a ratio, {ratio:.0%}."
        yield "Of the fastest, 1 leaves the most memory. Measure them on your GPUs: jaxlc sweep --run (docs/sweep.md)."


def row_text(row: Row) -> str:
    """Estimated time and memory of a compiled candidate in one line, or why there are none."""
    if row["status"] != "done":
        return f"{row['status']}: {row['reason']}"
    on_host = f" and {row['host_bytes_per_node'] / 2**30:,.0f} GiB of host memory" if row["host_bytes_per_node"] else ""
    fits = "" if row["fits"] else ", does not fit"
    return f"{two_digits(time_interval(row)[1])} s per step, {row['device_peak_bytes'] / 2**30:.0f} GiB{on_host}{fits}"


def _nothing_fits(recommendation: Recommendation, alternatives: Alternatives) -> Iterator[str]:
    yield "nothing fits. Estimated, not compiled:"
    if alternatives.seq_len is None:
        yield f"  no sequence length fits {recommendation.gpus}"
    else:
        yield f"  the longest sequence that fits {recommendation.gpus} has {alternatives.seq_len:,} tokens"
    if alternatives.gpus is None:
        yield "  more GPUs of this kind do not help: no mesh divides model and batch such that the step fits"
    else:
        yield f"  {alternatives.gpus.num_gpus} GPUs would do: --topology={alternatives.gpus}"
    smallest = recommendation.search.smallest
    if smallest is not None:
        yield f"  nearest: {smallest['overrides']}, {gib(smallest['device_peak_bytes'])} GiB per GPU, compiled"
