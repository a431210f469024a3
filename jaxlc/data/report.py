"""The report of `jaxlc data report`: documents and tokens of each source by length, and shares and
epochs per stage.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlc.config import Stage
from jaxlc.core.text import aligned
from jaxlc.data.data_sources import with_epochs
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
