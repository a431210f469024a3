"""What `jaxlc data` prints. `report`: documents and tokens of each source by length, and shares and
epochs per stage. `show`: examples of documents, chats, traces and prompts as a run uses them, with
their loss mask.
"""

import functools
import html
import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxlc.config import Config, Stage, load_stages
from jaxlc.core import Log, aligned, checked, count_text, paragraph, plot_style, progress_lines
from jaxlc.data import data_sources
from jaxlc.data.data_sources import with_epochs
from jaxlc.data.sequences.loader import DataSource, SourceShare, SourceView
from jaxlc.data.tokens.tokenizers import Tokenizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Limits in tokens between the length classes of the report.
LENGTH_LIMITS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
CLASS_NAMES = ("< 1K", "1K-4K", "4K-16K", "16K-64K", "64K-256K", "256K-1M", ">= 1M")
_SHARE_HEADINGS = (
    "",
    "share set",
    "realized",
    "tokens",
    "documents/epoch",
    "tokens/epoch",
    "epochs",
)


class StageShares(NamedTuple):
    """What the sequences of one stage contain."""

    stage: Stage
    num_sequences: int
    shares: Sequence[SourceShare]  # none for rollouts, which are not known before the run

    @classmethod
    def of(cls, stage: Stage, source: DataSource) -> "StageShares":
        stage = with_epochs(stage, source)
        num_sequences = stage.num_steps * stage.config.train.global_batch_size
        return cls(stage, num_sequences, source.shares(num_sequences))


def by_class(lengths: np.ndarray) -> np.ndarray:
    """Documents and tokens in each class of lengths, int64 [2, classes]; lengths int64 [documents]."""
    classes = np.searchsorted(np.array(LENGTH_LIMITS), lengths, side="right")
    num_classes = len(CLASS_NAMES)
    counts = [np.bincount(classes, weights, num_classes) for weights in (None, lengths)]
    return np.array(counts).astype(np.int64)


def report_text(sources: Sequence[SourceView], stages: Sequence[StageShares]) -> str:
    """Two tables of the sources by length, and one per stage."""
    lines = [
        "training and held-out documents, traces or prompts and their tokens, by length in tokens"
    ]
    for index, unit in enumerate(("documents", "tokens")):
        rows = [(source.name, by_class(source.lengths)[index]) for source in sources]
        if len(rows) > 1:
            rows.append(("all sources", np.sum([counts for _, counts in rows], axis=0)))
        table = [[name, *(f"{x:,}" for x in (*counts, counts.sum()))] for name, counts in rows]
        lines += ["", *aligned([[unit, *CLASS_NAMES, "all"], *table])]
    for stage, num_sequences, shares in stages:
        seq_len = stage.config.data.seq_len
        num_tokens = sum(share.num_tokens for share in shares)
        padding = 1 - num_tokens / (num_sequences * seq_len)
        rows = [
            [
                share.name,
                f"{share.share:.2%}",
                f"{share.realized_share:.2%}",
                f"{share.num_tokens:,}",
                f"{share.num_documents:,}",
                f"{share.epoch_tokens:,}",
                f"{share.num_epochs:.3g}",
            ]
            for share in shares
        ]
        title = f"stage {stage.name}" if stage.name else "the run"
        lines += [
            "",
            f"{title}: {num_sequences:,} sequences of {seq_len:,} tokens, {padding:.2%} of them padding",
            *aligned([_SHARE_HEADINGS, *rows]),
        ]
    return "\n".join(lines)


_FIRST_TOKENS, _LAST_TOKENS = 200, 50  # shown of a longer run of tokens with or without a loss
_COLOR, _NO_COLOR = "\x1b[32m", "\x1b[0m"  # green
_BRACKETS = ("⟦", "⟧")
_LOSS_STYLE = "background:rgba(0,160,90,0.25)"
_TEXT_STYLE = (
    "background:transparent;color:currentColor;font-size:12px;margin:4px 0;white-space:pre-wrap"
)
# Control characters, which would move the cursor of a terminal, as pictures.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


class Run(NamedTuple):
    """Consecutive tokens of a document that all have a loss, or all have none."""

    text: str
    has_loss: bool


class Example(NamedTuple):
    """A document, or the part of it that is in a sequence."""

    heading: str
    runs: tuple[Run, ...]
    depth: int = 0  # in a tree of traces

    def marked(self, before: str, after: str, escaped: Callable[[str], str] = str) -> str:
        """The text, with `before` and `after` around the tokens that have a loss."""
        return "".join(
            f"{before}{escaped(text)}{after}" if has_loss else escaped(text)
            for text, has_loss in self.runs
        )


class SourceExamples(NamedTuple):
    """Examples of one source."""

    heading: str
    examples: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Examples:
    """Examples of each source; a notebook shows them with colors, and `print` with brackets."""

    sources: tuple[SourceExamples, ...]
    warnings: tuple[str, ...] = ()

    def text(self, *, color: bool = False) -> str:
        """The examples with the tokens that have a loss in ANSI colors, or in brackets."""
        before, after = (_COLOR, _NO_COLOR) if color else _BRACKETS
        lines = [f"tokens with a loss: {before}{'green' if color else 'in such brackets'}{after}"]
        for source in self.sources:
            lines += ["", source.heading]
            for example in source.examples:
                text = f"--- {example.heading}\n{example.marked(before, after)}"
                lines += ["", textwrap.indent(text, "    " * example.depth)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        parts = [paragraph(f"warning: {warning}") for warning in self.warnings]
        parts.append(paragraph("Tokens with a loss are green."))
        for source in self.sources:
            parts.append(paragraph(source.heading))
            for example in source.examples:
                text = example.marked(f"<span style='{_LOSS_STYLE}'>", "</span>", html.escape)
                text = f"{paragraph(example.heading)}<pre style='{_TEXT_STYLE}'>{text}</pre>"
                parts.append(f"<div style='margin-left:{3 * example.depth}em'>{text}</div>")
        return "\n".join(parts)


@checked
def show(config: ConfigDict | Config, *, num: int = 3) -> Examples:
    """Examples of the training data of a config, from its first sequences: what a chat template
    makes of chats, which tokens have a loss, and where documents begin and end. Sources that are
    not tokenized yet are tokenized.

    Args:
      config: a ConfigDict or Config. A source of several stages is shown with the first of them.
      num: the number of documents or prompts of each source, or of groups of traces.
    Raises:
      UserError: the config is invalid, or the data cannot be read.
    """
    return examples_of_stages(load_stages(config), num)


def examples_of_stages(stages: Sequence[Stage], num: int, log: Log | None = None) -> Examples:
    """As `show`.

    Args:
      log: prints one line while a corpus is opened.
    """
    sources = dict[str, SourceExamples]()
    warnings = dict[str, None]()
    for stage in stages:
        source = open_shown(stage.config, log)
        warnings |= dict.fromkeys(source.warnings)
        for view in source.views():
            if view.name not in sources:
                shown = [
                    tokens for group in itertools.islice(view.examples, num) for tokens in group
                ]
                documents = count_text(len(view.lengths), view.unit)
                sources[view.name] = SourceExamples(
                    _heading(
                        f"{view.name}: {documents},", int(view.lengths.sum()), view.num_loss_tokens
                    ),
                    tuple(
                        Example(
                            _heading(f"{title}:", len(tokens), int(has_loss.sum())),
                            tuple(_runs(tokens, has_loss, source.tokenizer)),
                            depth,
                        )
                        for title, tokens, has_loss, depth in shown
                    ),
                )
    return Examples(sources=tuple(sources.values()), warnings=tuple(warnings))


def open_shown(config: Config, log: Log | None) -> DataSource:
    """What a run trains on; for rollouts of the policy, their prompts.

    Args:
      log: prints one line while a corpus is opened, and lines about its progress are printed then, too.
    Raises:
      UserError: as `data_sources.open`.
    """
    progress = functools.partial(progress_lines, is_shown=log is not None)
    return data_sources.open(
        config, is_trained=False, progress=progress, log=log or (lambda line: None)
    )


def _runs(tokens: np.ndarray, has_loss: np.ndarray, tokenizer: Tokenizer) -> Iterator[Run]:
    """The runs of a document.

    Args:
      has_loss: bool [tokens], of the token after each one.
    """
    is_trained = np.concatenate([[False], has_loss[:-1]])
    borders = [0, *(np.flatnonzero(np.diff(is_trained)) + 1).tolist(), len(tokens)]
    for begin, end in zip(borders[:-1], borders[1:]):
        num_left_out = end - begin - _FIRST_TOKENS - _LAST_TOKENS
        if num_left_out <= 0:
            text = _text(tokens, begin, end, tokenizer)
        else:
            first = (begin, begin + _FIRST_TOKENS)
            last = (end - _LAST_TOKENS, end)
            note = f" ... [{count_text(num_left_out, 'more token')}] ... "
            text = note.join(_text(tokens, *span, tokenizer) for span in (first, last))
        yield Run(text, bool(is_trained[begin]))


def _text(tokens: np.ndarray, begin: int, end: int, tokenizer: Tokenizer) -> str:
    """The text of some tokens, which for many tokenizers depends on the token before them."""
    before = tokens[max(begin - 1, 0) : begin]
    text = tokenizer.decode(tokens[max(begin - 1, 0) : end], special_tokens=True)
    return text[len(tokenizer.decode(before, special_tokens=True)) :].translate(_PICTURES)


def _heading(start: str, num_tokens: int, num_loss_tokens: int) -> str:
    return (
        f"{start} {count_text(num_tokens, 'token')}, {num_loss_tokens:,} with a loss"
        f" ({num_loss_tokens / num_tokens:.1%})"
    )


def report_figure(sources: Sequence[SourceView], stages: Sequence[StageShares]) -> "Figure":
    """Tokens by document length of each source; shares of the tokens; and epochs in each stage."""
    names = [source.name for source in sources]
    figure = plot_style.new_figure(11, 2.3 + 0.34 * len(names) * max(1, len(stages)) ** 0.5)
    lengths, shares, epochs = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1, 1))
    _plot_lengths(lengths, sources)
    rows = np.arange(len(names))
    height = 0.8 / len(stages)
    styles = itertools.cycle(itertools.product(plot_style.HATCHES, plot_style.CYCLE))
    for number, (stage, (hatch, color)) in enumerate(zip(stages, styles)):
        style = dict(color=color, hatch=hatch, edgecolor="white", linewidth=0)
        by_name = {share.name: share for share in stage.shares}
        present = [by_name.get(name) for name in names]
        at = rows + (number - (len(stages) - 1) / 2) * height
        realized = [100 * share.realized_share if share else 0 for share in present]
        num_epochs = [share.num_epochs if share else 0 for share in present]
        shares.barh(at, realized, 0.9 * height, **style, label=stage.stage.name or "the run")
        bars = epochs.barh(at, num_epochs, 0.9 * height, **style)
        epochs.bar_label(
            bars, [f"{count:.3g}" if count else "" for count in num_epochs], padding=3, fontsize=8
        )
    for axes, label in (
        (lengths, "tokens"),
        (shares, "share of the tokens (%)"),
        (epochs, "epochs"),
    ):
        plot_style.style_axes(axes, grid="x")
        axes.set_xlabel(label)
    epochs.margins(x=0.15)
    if len(stages) > 1:
        _draw_legend(shares, "outside lower right", "stage")
    lengths.set_yticks(rows, names)
    lengths.invert_yaxis()
    plot_style.set_title(
        figure, "Tokens of each source by document length; shares and epochs of the run"
    )
    return figure


def _plot_lengths(axes: "Axes", sources: Sequence[SourceView]) -> None:
    from matplotlib.ticker import EngFormatter

    left = np.zeros(len(sources))
    shades = [str(shade) for shade in np.linspace(0.85, 0.15, len(CLASS_NAMES))]
    for number, name in enumerate(CLASS_NAMES):
        tokens = np.array([by_class(source.lengths)[1][number] for source in sources], float)
        if tokens.any():
            axes.barh(range(len(sources)), tokens, 0.7, left=left, color=shades[number], label=name)
        left += tokens
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _draw_legend(axes, "outside lower left", "document length in tokens")


def _draw_legend(axes: "Axes", place: str, title: str) -> None:
    """A legend of the figure, in one line, for the bars of `axes`."""
    handles, _ = axes.get_legend_handles_labels()
    style = dict(fontsize=8, title_fontsize=8, frameon=False, alignment="left")
    axes.figure.legend(handles=handles, loc=place, ncols=max(1, len(handles)), title=title, **style)
