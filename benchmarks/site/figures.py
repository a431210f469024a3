"""The figures of docs/architecture.md: ring attention in zigzag order, what layer kinds send, and a
layer in tiles.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlc.core.plot_style import AMBER, BLUE, FAINT, GRAY, RED, SILVER, TEAL, VIOLET, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RANKS = 4
_COLORS = (BLUE, TEAL, AMBER, RED)  # one per ring step
_RANK_COLORS = ("#c9daee", "#e3dcf0", "#dfe7d3", "#f3dfd0")
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxlc",
    "font.family": "sans-serif",
    "font.size": 9,
}


def write(directory: Path) -> None:
    """Writes zigzag_ring.svg, layer_kinds.svg and layer_tiles.svg."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        for draw in (zigzag_ring, layer_kinds, layer_tiles):
            figure = draw()
            figure.savefig(
                directory / f"{draw.__name__}.svg",
                metadata={"Date": None},
                bbox_inches="tight",
                pad_inches=0.1,
            )


def zigzag_ring() -> "Figure":
    """Chunks of each rank, the ring step that computes each block of the scores, and the overlap of
    hops.
    """
    figure = new_figure(9.6, 5.0, layout="none")
    _draw_ranks(figure.add_axes((0.02, 0.42, 0.4, 0.54)))
    _draw_scores(figure.add_axes((0.5, 0.36, 0.48, 0.6)))
    _draw_steps(figure.add_axes((0.02, 0.02, 0.96, 0.26)))
    return figure


def _draw_ranks(axes: "Axes") -> None:
    """The two chunks of each rank, and the hops of K and V."""
    _prepare(
        axes, 10, 6, f"Zigzag order: rank r of {_RANKS} holds chunks r and {2 * _RANKS - 1} - r"
    )
    for chunk in range(2 * _RANKS):
        _box(axes, 0.2 + chunk, 4.9, 0.94, 0.7, str(chunk), _RANK_COLORS[_rank_of(chunk)])
    for rank in range(_RANKS):
        y = 3.5 - 1.05 * rank
        axes.text(0.2, y + 0.35, f"rank {rank}", va="center")
        for column, chunk in enumerate((rank, 2 * _RANKS - 1 - rank)):
            _box(axes, 2 + column, y, 0.94, 0.7, str(chunk), _RANK_COLORS[rank])
        axes.text(4.3, y + 0.35, "Q stays; K and V are sent", va="center", color=GRAY, fontsize=8)
        if rank < _RANKS - 1:
            _arrow(axes, (2.97, y - 0.03), (2.97, y - 0.33))
    bottom, top, right = 3.5 - 1.05 * (_RANKS - 1) + 0.35, 3.85, 9.3
    axes.plot((8.4, right, right), (bottom, bottom, top), color=GRAY, linewidth=1.2)
    _arrow(axes, (right, top), (8.4, top))


def _draw_scores(axes: "Axes") -> None:
    """The score matrix in natural order, colored by ring step, with the rank that computes each
    block.
    """
    size = 2 * _RANKS
    _prepare(
        axes, size + 4.5, size + 1.2, "Scores: the ring step and the rank that compute each block"
    )
    for query in range(size):
        y = size - 1 - query
        axes.text(-0.15, y + 0.5, str(query), ha="right", va="center", color=GRAY, fontsize=8)
        axes.text(
            query + 0.5, size + 0.25, str(query), ha="center", va="center", color=GRAY, fontsize=8
        )
        for key in range(size):
            if key > query:
                _box(axes, key, y, 0.96, 0.96, "", FAINT)
                continue
            rank = _rank_of(query)
            color = _COLORS[(rank - _rank_of(key)) % _RANKS]
            if key == query:
                _box(axes, key, y, 0.96, 0.96, "", FAINT)
                axes.fill((key, key, key + 0.96), (y, y + 0.96, y), color=color, linewidth=0)
                axes.text(
                    key + 0.3,
                    y + 0.27,
                    f"r{rank}",
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=7,
                )
            else:
                _box(axes, key, y, 0.96, 0.96, f"r{rank}", color, text_color="white", fontsize=8)
    for step, color in enumerate(_COLORS):
        _box(axes, size + 0.6, size - 1.2 - step, 0.6, 0.6, "", color)
        axes.text(
            size + 1.4,
            size - 0.9 - step,
            f"step {step}" + (", causal" if step == 0 else ""),
            va="center",
        )
    axes.text(
        size + 0.6,
        1.7,
        "rows: query chunks\ncolumns: key chunks\n\nfrom step 1 on, each\nrank has two blocks",
        color=GRAY,
        va="center",
    )


def _draw_steps(axes: "Axes") -> None:
    """Attention and hops of one rank over time."""
    _prepare(
        axes,
        24,
        3.4,
        "One rank: the hop of the next K and V runs while attention computes with the current ones",
    )
    axes.text(0, 1.9, "attention", va="center")
    axes.text(0, 0.7, "K, V hop", va="center")
    x, width = 3.0, 4.4
    for step, color in enumerate(_COLORS):
        label = "own block, causal" if step == 0 else f"two blocks, K and V of rank r - {step}"
        _box(axes, x, 1.45, width, 0.9, label, color, text_color="white", fontsize=7)
        if step < _RANKS - 1:
            _box(
                axes, x, 0.3, 0.6 * width, 0.8, f"to r + 1, for step {step + 1}", SILVER, fontsize=7
            )
            _box(axes, x + width + 0.05, 1.45, 0.65, 0.9, "merge", FAINT, fontsize=6)
        x += width + 0.75


def layer_kinds() -> "Figure":
    """What a rank sends in one layer of each kind, and how many bytes at two sequence lengths."""
    figure = new_figure(7.2, 5.6, layout="none")
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    _prepare(axes, 25.4, 19.4, "What each rank sends in one layer, forward")
    for x, text in ((19.6, "128K tokens"), (23.6, "1M tokens")):
        axes.text(x, 18.6, text, ha="center", fontsize=8, color=GRAY)
    rows = (
        (
            _draw_ring,
            "448 MiB",
            "3.5 GiB",
            "full, nope: ring",
            "K and V of all its tokens, around the ring",
        ),
        (
            _draw_heads,
            "280 MiB",
            "2.2 GiB",
            "full, nope: ulysses",
            "q, k, v and out of the heads of rank i, to rank i",
        ),
        (
            _draw_halo,
            "8 MiB",
            "8 MiB",
            "sliding",
            "K and V of the last window - 1 tokens of both chunks",
        ),
        (
            _draw_states,
            "32 MiB",
            "32 MiB",
            "Gated DeltaNet",
            "for both chunks: states (S), and 3 tokens (lines)",
        ),
    )
    for index, (draw, *sizes, name, what) in enumerate(rows):
        y = 14.3 - 4.65 * index
        axes.text(0, y + 3.1, name, fontweight="bold")
        axes.text(0, y + 2.3, what, fontsize=8, color=GRAY)
        for rank in range(_RANKS):
            _box(axes, 4.4 * rank, y, 3.4, 1.7, "", FAINT)
            axes.text(
                4.4 * rank + 0.15, y + 1.32, f"rank {rank}", va="center", fontsize=7, color=GRAY
            )
        draw(axes, y)
        for x, size in zip((19.6, 23.6), sizes, strict=True):
            axes.text(x, y + 0.7, size, ha="center", va="center", fontweight="bold")
    return figure


def _draw_ring(axes: "Axes", y: float) -> None:
    for x in (4.4 * rank for rank in range(_RANKS)):
        _box(axes, x + 0.15, y + 0.15, 3.1, 0.8, "K, V", BLUE, "white", fontsize=8)
    _draw_hops(axes, y)
    last, below = 4.4 * (_RANKS - 1) + 1.7, y - 0.35
    axes.plot((last, last, 1.7, 1.7), (y, below, below, y - 0.2), color=GRAY, linewidth=1.2)
    _arrow(axes, (1.7, below), (1.7, y))


def _draw_heads(axes: "Axes", y: float) -> None:
    for rank in range(_RANKS):
        for head, color in enumerate(_COLORS):
            x = 4.4 * rank + 0.15 + 0.79 * head
            _box(
                axes,
                x,
                y + 0.15,
                0.73,
                0.8,
                str(head),
                color,
                "black" if color == AMBER else "white",
                fontsize=8,
            )
    for x in (4.4 * rank + 1.7 for rank in range(_RANKS)):
        _arrow(axes, (x, y - 0.35), (x, y))
    axes.plot((1.7, 4.4 * (_RANKS - 1) + 1.7), (y - 0.35, y - 0.35), color=GRAY, linewidth=1.2)


def _draw_halo(axes: "Axes", y: float) -> None:
    for x in (4.4 * rank for rank in range(_RANKS)):
        _box(axes, x + 0.15, y + 0.15, 3.1, 0.8, "", "white")
        for chunk_end in (x + 1.45, x + 3.0):
            _box(axes, chunk_end, y + 0.15, 0.25, 0.8, "", BLUE)
        axes.plot((x + 1.7, x + 1.7), (y + 0.15, y + 0.95), color=SILVER, linewidth=1.2)
    _draw_hops(axes, y, "<|-|>")


def _draw_states(axes: "Axes", y: float) -> None:
    for x in (4.4 * rank for rank in range(_RANKS)):
        _box(axes, x + 0.15, y + 0.15, 3.1, 0.8, "", "white")
        for chunk in (x + 0.4, x + 1.95):
            _box(axes, chunk, y + 0.2, 0.7, 0.7, "S", VIOLET, "white", fontsize=8)
            for token in range(3):
                _box(axes, chunk + 0.85 + 0.13 * token, y + 0.15, 0.07, 0.8, "", "black")
    _draw_hops(axes, y, "<|-|>")


def _draw_hops(axes: "Axes", y: float, style: str = "-|>") -> None:
    """Arrows between neighboring ranks."""
    for x in (4.4 * rank for rank in range(1, _RANKS)):
        _arrow(axes, (x - 1.0, y + 0.55), (x, y + 0.55), style)


def layer_tiles() -> "Figure":
    """The two scans of a layer with memory.tile_tokens, and what exists at full length."""
    figure = new_figure(9.6, 3.7, layout="none")
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    _prepare(
        axes, 24, 8.6, "A decoder layer with memory.tile_tokens: two scans over tiles, forward"
    )
    for name, x, color in (
        ("x, the residual stream: full length", 0.1, BLUE),
        ("K and V: full length", 14, TEAL),
    ):
        axes.text(x, 7.2, name)
        for tile in range(_RANKS):
            is_current = color == BLUE and tile == 1
            _box(
                axes,
                x + 2.2 * tile,
                5.9,
                2.1,
                0.9,
                f"tile {tile}",
                color,
                "white",
                alpha=1 if is_current else 0.6,
            )
    _arrow(axes, (9.1, 6.35), (13.8, 6.35))
    axes.text(11.45, 6.55, "scan 1: norm, K, V", ha="center", fontsize=8)
    axes.text(0.1, 4.6, "scan 2, one tile after the other:")
    steps = (
        "tile of x",
        "norm, Q",
        "attention over\nall earlier K, V",
        "projection\n+ residual",
        "gate, up, down\n+ residual",
        "tile of y,\nwritten over x",
    )
    for index, name in enumerate(steps):
        color = BLUE if index in (0, len(steps) - 1) else TEAL if index == 2 else FAINT
        _box(
            axes,
            0.1 + 4 * index,
            2.3,
            3.2,
            1.6,
            name,
            color,
            "black" if color == FAINT else "white",
            fontsize=8,
        )
        if index:
            _arrow(axes, (4 * index - 0.65, 3.1), (4 * index + 0.05, 3.1))
    axes.plot((18.3, 18.3, 9.7), (5.8, 4.9, 4.9), color=GRAY, linewidth=1.2, linestyle="--")
    _arrow(axes, (9.7, 4.9), (9.7, 3.95))
    axes.text(
        0.1,
        1.3,
        "Full length: x, which y overwrites, K and V; in the backward also dy, which dx overwrites, dK and dV.",
        color=GRAY,
    )
    axes.text(
        0.1,
        0.5,
        "One tile at a time: Q, attention output, MLP activations, kernel workspaces.",
        color=GRAY,
    )
    return figure


def _rank_of(chunk: int) -> int:
    return min(chunk, 2 * _RANKS - 1 - chunk)


def _prepare(axes: "Axes", width: float, height: float, title: str) -> None:
    axes.set_axis_off()
    axes.set_xlim(-0.4, width)
    axes.set_ylim(-0.1, height)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")


def _box(
    axes: "Axes",
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    color: str,
    text_color: str = "black",
    fontsize: float = 9,
    **style: Any,
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, linewidth=0, **style))
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        color=text_color,
        fontsize=fontsize,
    )


def _arrow(
    axes: "Axes", start: tuple[float, float], end: tuple[float, float], style: str = "-|>"
) -> None:
    axes.annotate(
        "", end, start, arrowprops=dict(arrowstyle=style, color=GRAY, shrinkA=0, shrinkB=0)
    )
