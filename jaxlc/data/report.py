"""The report of `jaxlc data report`: documents and tokens of each source by length, and shares and
epochs per stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxlc.config import Stage
from jaxlc.core.text import aligned
from jaxlc.data.sequences.source import DataSource, SourceShare, SourceView

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


@dataclass(frozen=True, kw_only=True)
class StageShares:
    """What the sequences of one stage contain."""

    name: str  # "" for a config without stages
    num_sequences: int
    seq_len: int
    shares: tuple[SourceShare, ...]


def stage_shares(stage: Stage, source: DataSource) -> StageShares | None:
    """What a stage trains on; None for rollouts, which are not known before the run."""
    num_sequences = stage.num_steps * stage.config.train.global_batch_size
    shares = source.shares(num_sequences)
    if not shares:
        return None
    return StageShares(
        name=stage.name,
        num_sequences=num_sequences,
        seq_len=stage.config.data.seq_len,
        shares=tuple(shares),
    )


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
    for stage in stages:
        num_tokens = sum(share.num_tokens for share in stage.shares)
        padding = 1 - num_tokens / (stage.num_sequences * stage.seq_len)
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
            for share in stage.shares
        ]
        title = f"stage {stage.name}" if stage.name else "the run"
        lines += [
            "",
            f"{title}: {stage.num_sequences:,} sequences of {stage.seq_len:,} tokens, {padding:.2%} of them padding",
            *aligned([_SHARE_HEADINGS, *rows]),
        ]
    return "\n".join(lines)
