"""Scores on disk: scores.jsonl, one line per score, in the directory of a checkpoint."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxlc.core.atomic_files import replacing
from jaxlc.core.counts import count_text
from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.foreign_files import read_json_lines
from jaxlc.core.text_table import aligned

SCORES_FILE = "scores.jsonl"


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One score: a mean over examples or documents."""

    task: str
    haystack: str  # name of the prose or of the documents; empty: none
    length: int  # in tokens
    depth: float | None = None  # needle and passkey only
    num_needles: int | None = None  # needle only
    score: float
    standard_error: float  # standard error of the mean over examples; NaN for one example
    num_examples: int
    seconds: float  # time of this call; stored predictions take none
    unit: Literal["%", "nats"] = "%"  # nats: per token
    chat: bool = False  # the prompt was in a chat template
    model: str = ""  # fingerprint of its parameters and settings
    # Ends of the 95% interval of a bootstrap over documents; None: no documents, or fewer than 5.
    low: float | None = None
    high: float | None = None

    @property
    def subject(self) -> tuple:
        """What was scored: a later score of the same subject replaces this one."""
        return self.task, self.haystack, self.length, self.depth, self.num_needles, self.chat

    def __str__(self) -> str:
        depth = "" if self.depth is None else f" depth {self.depth:>4.0%}"
        digits, noun = (1, "example") if self.unit == "%" else (4, "document")
        error = "" if math.isnan(self.standard_error) else f" ± {self.standard_error:.{digits}f}"
        interval = "" if self.low is None else f" [{self.low:z.4f}, {self.high:z.4f}]"
        score = f"{self.score:z5.{digits}f}{error} {self.unit}{interval}"
        count = count_text(self.num_examples, noun)
        return f"{self.task:<16} {self.length:>10,}{depth}  {score}, {count}, {self.seconds:,.0f} s"


def read_scores(directory: Path) -> list[ScoreRow]:
    """The scores in the directory of a checkpoint; none if it has no file.

    Raises:
      UserError: the file is damaged.
    """
    path = directory / SCORES_FILE
    rows = read_json_lines(path) if path.exists() else []
    try:
        for row in rows:
            row["standard_error"] = math.nan if row["standard_error"] is None else row["standard_error"]
        return [ScoreRow(**row) for row in rows]
    except (TypeError, KeyError) as error:
        raise UserError(f"cannot read {path} ({reason_of(error)}); remove it") from error


def comparison(scores: Mapping[str, Sequence[ScoreRow]]) -> list[str]:
    """A table with one line per task and length and one column per model; with two models, also the change.

    Scores of the needle and passkey tasks are means over their depths.

    Args:
      scores: label -> its rows.
    """
    groups: dict[tuple, dict[str, list[ScoreRow]]] = {}
    for label, rows in scores.items():
        for row in rows:
            groups.setdefault((row.task, row.length, row.unit), {}).setdefault(label, []).append(row)
    lines = [["", "length", "", *scores, *(["change"] if len(scores) == 2 else [])]]
    for (task, length, unit), by_label in groups.items():
        digits = 1 if unit == "%" else 4
        means = [sum(row.score for row in rows) / len(rows) for rows in map(by_label.__getitem__, scores)]
        cells = [f"{mean:.{digits}f}" for mean in means]
        if len(scores) == 2:
            cells.append(f"{means[1] - means[0]:+.{digits}f}")
        lines.append([task, f"{length:,}", unit, *cells])
    return aligned(lines)


def step_directories(out: Path) -> list[Path]:
    """The directories of checkpoints in `out`, earlier steps first."""
    return sorted(out.glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))


def store_scores(directory: Path, rows: Sequence[ScoreRow]) -> None:
    """Adds scores to those in `directory`; scores of the same subject, and those of other models, are removed."""
    models = {row.model for row in rows}
    kept = [row for row in read_scores(directory) if row.model in models or not models]
    by_subject = {row.subject: row for row in [*kept, *rows]}
    with replacing(directory / SCORES_FILE) as out:
        out.write("".join(map(_line, by_subject.values())).encode())


def _line(row: ScoreRow) -> str:
    values = {name: None if value != value else value for name, value in vars(row).items()}  # JSON has no NaN
    return json.dumps(values, allow_nan=False) + "\n"
