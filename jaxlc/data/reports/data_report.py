"""The report of `jaxlc data report`: documents and tokens of each source by length, and shares and epochs per stage."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxlc.config import Config
from jaxlc.core.text_table import aligned
from jaxlc.data.corpus import Corpus
from jaxlc.data.reports.shares import SourceShare, source_shares
from jaxlc.data.traces.open_traces import Prompts, TraceData

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
