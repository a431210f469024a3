"""The report of `jaxlc data report`: documents and tokens of each source by length, shares and epochs per stage, a
figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from jaxlc.config import Config
from jaxlc.core import plot_style
from jaxlc.core.text import aligned, count_text
from jaxlc.data.corpus import Corpus
from jaxlc.data.traces.open_traces import Prompts, TraceData


class SourceShare(NamedTuple):
    """The part of a source in the first sequences of a run."""

    name: str  # "" for data.sources
    share: float  # fraction of the tokens, as set
    realized_share: float  # fraction of the tokens in those sequences
    num_tokens: int  # in those sequences, without padding
    num_epochs: float
    num_documents: int  # per epoch
    epoch_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.share:.2%} of the tokens, {self.realized_share:.2%} in this run;"
            f" {count_text(self.num_documents, 'document')}, {count_text(self.epoch_tokens, 'token')},"
            f" {self.num_epochs:.3g} epochs"
        )


def source_shares(corpus: Corpus, num_sequences: int) -> list[SourceShare]:
    """The sources of the first `num_sequences` training sequences."""
    num_tokens = corpus.num_tokens_of_first(num_sequences)
    total = max(1, sum(num_tokens.values()))
    return [
        SourceShare(
            name=source.name,
            share=source.share,
            realized_share=num_tokens[source.name] / total,
            num_tokens=num_tokens[source.name],
            num_epochs=num_tokens[source.name] / source.train.num_tokens,
            num_documents=source.train.num_documents,
            epoch_tokens=source.train.num_tokens,
        )
        for source in corpus.sources
    ]


def share_lines(corpus: Corpus, num_sequences: int) -> list[str]:
    """One line per source of a mixture, for the start of a run; none without a mixture."""
    return [f"source     {share}" for share in source_shares(corpus, num_sequences) if share.name]


# Limits in tokens between the length classes of the report.
LENGTH_LIMITS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
CLASS_NAMES = ("< 1K", "1K-4K", "4K-16K", "16K-64K", "64K-256K", "256K-1M", ">= 1M")
_SHARE_HEADINGS = ("", "share set", "realized", "tokens", "documents/epoch", "tokens/epoch", "epochs")


@dataclass(frozen=True, kw_only=True)
class SourceLengths:
    """All documents of a source, training and held-out ones, by length."""

    name: str
    num_documents: np.ndarray  # int64 [classes]
    num_tokens: np.ndarray  # int64 [classes]


@dataclass(frozen=True, kw_only=True)
class StageShares:
    """What the sequences of one stage contain."""

    name: str  # "" for a config without stages
    num_sequences: int
    seq_len: int
    shares: tuple[SourceShare, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, without padding."""
        return sum(share.num_tokens for share in self.shares)


def source_lengths(opened: Corpus | TraceData | Prompts) -> list[SourceLengths]:
    """The sources of a run by length of their documents, traces or prompts."""
    if isinstance(opened, Prompts):
        lengths_of = {"rollouts.prompts": np.array([len(prompt.ids) for prompt in opened.prompts])}
    elif isinstance(opened, TraceData):
        lengths_of = {"data.traces": np.array([len(trace.tokens) for trace in opened.traces])}
    else:
        lengths_of = {source.name or "data.sources": np.diff(source.train.store.offsets) for source in opened.sources}
    return [
        SourceLengths(
            name=name,
            num_documents=np.bincount(_classes(lengths), minlength=len(CLASS_NAMES)),
            num_tokens=np.bincount(_classes(lengths), lengths, len(CLASS_NAMES)).astype(np.int64),
        )
        for name, lengths in lengths_of.items()
    ]


def stage_shares(
    name: str, opened: Corpus | TraceData | Prompts, num_sequences: int, config: Config
) -> StageShares | None:
    """The first `num_sequences` training sequences of a run; None for prompts, whose answers are not known."""
    if isinstance(opened, Prompts):
        return None
    if isinstance(opened, TraceData):
        train, num_epochs = opened.train, num_sequences / opened.train.num_sequences
        num_tokens = round(train.num_tokens * num_epochs)
        shares = [SourceShare("data.traces", 1.0, 1.0, num_tokens, num_epochs, train.num_traces, train.num_tokens)]
    else:
        shares = [share._replace(name=share.name or "data.sources") for share in source_shares(opened, num_sequences)]
    return StageShares(name=name, num_sequences=num_sequences, seq_len=config.data.seq_len, shares=tuple(shares))


def trace_lines(data: TraceData) -> list[str]:
    """Groups, shared prefixes, tokens in the loss and means of rewards of traces."""
    num_tokens = sum(len(trace.tokens) for trace in data.train.traces)
    num_in_loss = sum(int(trace.in_loss.sum()) for trace in data.train.traces)
    shared = [tree.num_prefix_tokens for tree in data.train.trees if tree.num_prefix_tokens]
    return [
        f"traces     {data.description}",
        f"loss       {num_in_loss:,} of {num_tokens:,} tokens ({num_in_loss / num_tokens:.1%})",
        f"prefixes   {len(shared):,} shared ones of {sum(shared):,} tokens",
        "means      " + ", ".join(f"{name} {x:.4g}" for name, x in data.rewards.items()),
    ]


def report_text(sources: Sequence[SourceLengths], stages: Sequence[StageShares]) -> str:
    """Two tables of the sources by length, and one per stage."""
    header = [*CLASS_NAMES, "all"]
    names = [source.name for source in sources]
    lines = ["training and held-out documents, traces or prompts and their tokens, by length in tokens"]
    for unit, numbers in (
        ("documents", [source.num_documents for source in sources]),
        ("tokens", [source.num_tokens for source in sources]),
    ):
        rows = [*zip(names, numbers), *([("all sources", np.sum(numbers, axis=0))] if len(sources) > 1 else [])]
        table = [[name, *map(_number, [*row, row.sum()])] for name, row in rows]
        lines += ["", *aligned([[unit, *header], *table])]
    for stage in stages:
        padding = 1 - stage.num_tokens / (stage.num_sequences * stage.seq_len)
        rows = [
            [
                share.name,
                f"{share.share:.2%}",
                f"{share.realized_share:.2%}",
                _number(share.num_tokens),
                _number(share.num_documents),
                _number(share.epoch_tokens),
                f"{share.num_epochs:.3g}",
            ]
            for share in stage.shares
        ]
        title = f"stage {stage.name}" if stage.name else "the run"
        lines += [
            "",
            f"{title}: {stage.num_sequences:,} sequences of {stage.seq_len:,} tokens, {padding:.2%} of them padding",
            *aligned([_SHARE_HEADINGS, *rows]),
        ]
    return "\n".join(lines)


def _classes(lengths: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.array(LENGTH_LIMITS), lengths, side="right")


def _number(number: float) -> str:
    return f"{int(number):,}"


def report_figure(sources: Sequence[SourceLengths], stages: Sequence[StageShares]) -> Figure:
    """Tokens by document length of each source; shares of the tokens; and epochs in each stage."""
    names = [source.name for source in sources]
    figure = plot_style.new_figure(11, 2.3 + 0.34 * len(names) * max(1, len(stages)) ** 0.5)
    lengths, shares, epochs = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1, 1))
    _plot_lengths(lengths, sources)
    rows = np.arange(len(names))
    height = 0.8 / len(stages)
    for number, stage in enumerate(stages):
        cycle, place = divmod(number, len(plot_style.CYCLE))
        style = dict(color=plot_style.CYCLE[place], hatch=plot_style.HATCHES[cycle % len(plot_style.HATCHES)])
        style |= dict(edgecolor="white", linewidth=0)
        by_name = {share.name: share for share in stage.shares}
        at = rows + (number - (len(stages) - 1) / 2) * height
        realized = [100 * by_name[name].realized_share if name in by_name else 0 for name in names]
        num_epochs = [by_name[name].num_epochs if name in by_name else 0 for name in names]
        shares.barh(at, realized, 0.9 * height, **style, label=stage.name or "the run")
        bars = epochs.barh(at, num_epochs, 0.9 * height, **style)
        epochs.bar_label(bars, [f"{count:.3g}" if count else "" for count in num_epochs], padding=3, fontsize=8)
    for axes, label in ((lengths, "tokens"), (shares, "share of the tokens (%)"), (epochs, "epochs")):
        plot_style.style_axes(axes, grid="x")
        axes.set_xlabel(label)
    epochs.margins(x=0.15)
    if len(stages) > 1:
        _draw_legend(shares, "outside lower right", "stage")
    lengths.set_yticks(rows, names)
    lengths.invert_yaxis()
    plot_style.set_title(figure, "Tokens of each source by document length; shares and epochs of the run")
    return figure


def _plot_lengths(axes: Axes, sources: Sequence[SourceLengths]) -> None:
    left = np.zeros(len(sources))
    shades = [str(shade) for shade in np.linspace(0.85, 0.15, len(CLASS_NAMES))]
    for number, name in enumerate(CLASS_NAMES):
        tokens = np.array([source.num_tokens[number] for source in sources], float)
        if tokens.any():
            axes.barh(range(len(sources)), tokens, 0.7, left=left, color=shades[number], label=name)
        left += tokens
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _draw_legend(axes, "outside lower left", "document length in tokens")


def _draw_legend(axes: Axes, place: str, title: str) -> None:
    """A legend of the figure, in one line, for the bars of `axes`."""
    handles, _ = axes.get_legend_handles_labels()
    style = dict(fontsize=8, title_fontsize=8, frameon=False, alignment="left")
    axes.figure.legend(handles=handles, loc=place, ncols=max(1, len(handles)), title=title, **style)
