"""Plots of a sweep: a bar per mesh, and a line per transport over sequence length."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from jaxlc.core import plot_style
from jaxlc.core.plot_style import AMBER, BLUE, GRAY, RED, TEAL
from jaxlc.search.space import row_name

MESHES, TRANSPORTS = "meshes.png", "transports.png"
_MAX_BARS = 32
_COLORS = {"ring": BLUE, "hybrid": RED, "ulysses": TEAL, "all_gather": AMBER}


def write(rows: Sequence[dict], title: str, out: Path) -> list[Path]:
    """Writes the plots for rows sorted best first; returns their paths. Without completed points
    there is no plot.
    """
    done = [row for row in rows if row["status"] == "done"]
    figures = {MESHES: meshes_figure} if done else {}
    if len({row["transport"] for row in done}) > 1:
        figures[TRANSPORTS] = transports_figure
    for name, draw in figures.items():
        draw(done, title).savefig(out / name)
    return [out / name for name in figures]


def meshes_figure(done: Sequence[dict], title: str) -> Figure:
    """Tokens/s and memory, one bar per point, at the longest sequence length. `done`: completed
    rows, best first.
    """
    longest = max(row["seq_len"] for row in done)
    shown = [row for row in done if row["seq_len"] == longest][:_MAX_BARS]
    also = [name for name in ("remat", "transport") if len({row[name] for row in shown}) > 1]
    labels = [", ".join([row_name(row), *(row[name] for name in also)]) for row in shown]
    figure = plot_style.new_figure(10, 1.4 + 0.24 * len(shown))
    speed, memory = figure.subplots(1, 2, sharey=True)
    colors = [(_COLORS[row["strategy"]], 1.0 if row["fits"] else 0.35) for row in shown]
    places = range(len(shown))
    for axes, column, unit in (
        (speed, "tokens_per_second_per_device", 1),
        (memory, "device_peak_bytes", 2**30),
    ):
        axes.barh(places, [row[column] / unit for row in shown], color=colors, height=0.72)
        plot_style.style_axes(axes, "x")
    is_estimate = shown[0]["figures"] == "estimated"
    if is_estimate:
        memory.axvline(
            shown[0]["device_usable_bytes"] / 2**30,
            color=GRAY,
            linestyle=(0, (5, 4)),
            linewidth=0.9,
        )
    speed.set_yticks(places, labels, fontsize=8)
    speed.invert_yaxis()
    speed.set(xlabel="tokens/s per device")
    memory.set(xlabel="GiB per device" + ("; dashed: usable" if is_estimate else ""))
    names = list(dict.fromkeys(row["strategy"] for row in shown))
    if len(names) > 1:
        handles = [speed.barh(0, 0, color=_COLORS[name], label=name) for name in names]
        figure.legend(
            handles=handles, ncols=len(names), frameon=False, loc="outside lower right", fontsize=8
        )
    plot_style.set_title(figure, f"{title}, sequence length {longest:,}")
    return figure


def transports_figure(done: Sequence[dict], title: str) -> Figure:
    """Left: tokens/s of the best mesh over sequence length, one line per transport. Right: for
    every mesh, the speedup of each transport over the first one."""
    longest = max(row["seq_len"] for row in done)
    best = _program(next(row for row in done if row["seq_len"] == longest))
    names = sorted({row["transport"] for row in done})
    rate = {
        (_program(row), row["transport"], row["seq_len"]): row["tokens_per_second_per_device"]
        for row in done
    }
    lengths = sorted({row["seq_len"] for row in done})
    figure = plot_style.new_figure(12, 4)
    speed, gain = figure.subplots(1, 2)
    for number, name in enumerate(names):
        known = [length for length in lengths if (best, name, length) in rate]
        rates = [rate[best, name, length] for length in known]
        width = 5 - 3 * number / len(names)  # lines that coincide all stay visible
        speed.plot(
            known,
            rates,
            "o-",
            color=plot_style.CYCLE[number],
            linewidth=width,
            alpha=0.7,
            label=name,
        )
    lines = list(itertools.product(dict.fromkeys(_program(row) for row in done), names[1:]))
    for (program, name), line in zip(lines, plot_style.line_styles()):
        both = [n for n in lengths if (program, names[0], n) in rate and (program, name, n) in rate]
        gains = [100 * (rate[program, name, n] / rate[program, names[0], n] - 1) for n in both]
        gain.plot(
            both, gains, "o", **line, linewidth=1, markersize=3, label=f"{name}: {program[0]}"
        )
    for axes in (speed, gain):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
        axes.set_xlabel("sequence length, tokens")
        plot_style.style_axes(axes, "y")
    speed.legend(frameon=False, fontsize=7)
    # A long legend would cover the lines.
    figure.legend(handles=gain.get_lines(), loc="outside right upper", frameon=False, fontsize=7)
    speed.set_ylim(bottom=0)
    speed.set(ylabel="tokens/s per device", title=best[0])
    gain.set(ylabel="speedup, %", title=f"speedup over {names[0]}")
    plot_style.set_title(figure, title)
    return figure


def _program(row: dict) -> tuple[str, str]:
    """Everything but transport and sequence length."""
    return row_name(row), row["remat"]
