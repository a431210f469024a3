"""Results of evaluations on disk, and their scores.

Predictions are one JSON line per example, so that an interrupted evaluation resumes. They are
scored by the rules of RULER (Hsieh et al. 2024, arXiv:2404.06654, and its published scorer).
scores.jsonl in the directory of a checkpoint has one line per score.
"""

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from jaxlc.core import UserError, aligned, count_text, progress_lines, reason_of
from jaxlc.core.files import difference, read_json_lines, replacing, write_json_lines
from jaxlc.evals.haystack import Example
from jaxlc.runtime.watchdog import on_process_0

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
    rows = read_json_lines(path)
    try:
        for row in rows:
            row["standard_error"] = (
                math.nan if row["standard_error"] is None else row["standard_error"]
            )
        return [ScoreRow(**row) for row in rows]
    except (TypeError, KeyError) as error:
        raise UserError(f"cannot read {path} ({reason_of(error)}); remove it") from error


def comparison(scores: Mapping[str, Sequence[ScoreRow]]) -> list[str]:
    """A table with one line per task and length and one column per model; with two models, also the
    change.

    Scores of the needle and passkey tasks are means over their depths.

    Args:
      scores: label -> its rows.
    """
    groups: defaultdict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for label, rows in scores.items():
        for row in rows:
            groups[row.task, row.length, row.unit][label].append(row.score)
    lines = [["", "length", "", *scores, *(["change"] if len(scores) == 2 else [])]]
    for (task, length, unit), by_label in groups.items():
        digits = 1 if unit == "%" else 4
        means = [statistics.fmean(by_label[label]) for label in scores]
        cells = [f"{mean:.{digits}f}" for mean in means]
        if len(scores) == 2:
            cells.append(f"{means[1] - means[0]:+.{digits}f}")
        lines.append([task, f"{length:,}", unit, *cells])
    return aligned(lines)


def step_directories(out: Path) -> list[Path]:
    """The directories of checkpoints in `out`, earlier steps first; not copies with other names."""
    steps = {path: path.name.removeprefix("step-") for path in out.glob("step-*")}
    return sorted((x for x in steps if steps[x].isdecimal()), key=lambda path: int(steps[path]))


def store_scores(directory: Path, rows: Sequence[ScoreRow]) -> None:
    """Adds scores to those in `directory`; scores of the same subject, and of other models, are
    removed.
    """
    models = {row.model for row in rows}
    kept = [row for row in read_scores(directory) if row.model in models or not models]
    by_subject = {row.subject: row for row in [*kept, *rows]}
    with replacing(directory / SCORES_FILE) as out:
        out.write("".join(map(_line, by_subject.values())).encode())


def _line(row: ScoreRow) -> str:
    # JSON has no NaN
    values = {name: None if value != value else value for name, value in vars(row).items()}
    return json.dumps(values, allow_nan=False) + "\n"


_CONTROL = re.compile(r"[\x00-\x1f]")


class Score(NamedTuple):
    """The mean over examples; fields as in `ScoreRow`."""

    score: float
    standard_error: float
    num_examples: int


def cleaned(prediction: str) -> str:
    """The prediction without surrounding space; each control character is replaced by a line break."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def match_all(prediction: str, references: Sequence[str]) -> float:
    """The fraction of references that the prediction contains, in any case; RULER's
    `string_match_all`.
    """
    return sum(reference.lower() in prediction.lower() for reference in references) / len(
        references
    )


def match_any(prediction: str, references: Sequence[str]) -> float:
    """1 if the prediction contains a reference, in any case, else 0; RULER's `string_match_part`."""
    return float(any(reference.lower() in prediction.lower() for reference in references))


def score_of(values: Sequence[float], scale: float = 100.0) -> Score:
    """The mean of values in 0 .. 1, in percent, or with another `scale` in another unit."""
    count = len(values)
    error = statistics.stdev(values) / math.sqrt(count) if count > 1 else math.nan
    return Score(scale * statistics.fmean(values), scale * error, count)


# (examples, new tokens) -> continuations
Generate = Callable[[Sequence[Example], int], Sequence[str]]
_SHOWN_CHARACTERS = 400  # last characters of a prompt


@dataclass(frozen=True, kw_only=True)
class Case:
    """A set of examples that has one score."""

    name: str  # file name without directory
    make: Callable[[int], Example]  # index -> example
    match: Callable[[str, Sequence[str]], float]
    num_examples: int
    new_tokens: int
    data: str = ""  # fingerprint of the text in its examples


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The files of predictions of a model, one for each case."""

    directory: Path
    identity: dict  # what all of them depend on, such as the model; in the first line of each file
    batch_size: int  # rows that are made together
    replaces: bool = False  # rows of another header are replaced instead of refused

    def rows(
        self, header: dict, num_rows: int, make_rows: Callable[[list[int]], list[dict]]
    ) -> list[dict]:
        """The rows 0 .. num_rows - 1 of the file of a case. Those that it does not have are made and
        appended, batch by batch.

        Every process of a run makes the same call; only process 0 reads and writes the file.

        Args:
          header: what the rows depend on besides `identity`: `case`, the name of the file, and others.
          make_rows: indices of rows -> these rows.
        Raises:
          UserError: the file has rows of another header.
        """
        path = self.directory / f"{header['case']}.jsonl"
        header = header | self.identity
        lines = on_process_0(lambda: read_json_lines(path))
        changed = difference(lines[0], header) if lines else ""
        if changed and not self.replaces:
            raise UserError(
                f"{path} has predictions of another model, data or settings ({changed}): use another --out, or remove"
                f" {path.parent}"
            )
        rows = {} if changed else {row["index"]: row for row in lines[1:]}
        missing = [index for index in range(num_rows) if index not in rows]
        is_primary = jax.process_index() == 0
        if is_primary and missing:
            # without an incomplete line at its end
            write_json_lines(path, (header, *rows.values()))
        with progress_lines(path.stem, is_shown=is_primary) as update:
            for first in range(0, len(missing), self.batch_size):
                indices = missing[first : first + self.batch_size]
                made = zip(indices, make_rows(indices), strict=True)
                added = {index: dict(index=index) | row for index, row in made}
                rows |= added
                if is_primary:
                    with path.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in added.values())
                update(first + len(indices), len(missing))
        return [rows[index] for index in range(num_rows)]


def run_case(case: Case, generate: Generate, predictions: Predictions) -> Score:
    """Generates the predictions that do not exist yet, and scores all.

    Raises:
      UserError: there are predictions of another model or of other settings.
    """

    def make_rows(indices: list[int]) -> list[dict]:
        examples = [case.make(index) for index in indices]
        texts = generate(examples, case.new_tokens)
        return [
            dict(
                score=case.match(cleaned(text), example.references),
                prediction=text,
                references=example.references,
                depth=example.depth,
                end_of_prompt=example.text[-_SHOWN_CHARACTERS:],
            )
            for example, text in zip(examples, texts, strict=True)
        ]

    header = dict(case=case.name, new_tokens=case.new_tokens, data=case.data)
    rows = predictions.rows(header, case.num_examples, make_rows)
    return score_of([row["score"] for row in rows])
