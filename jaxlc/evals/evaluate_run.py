"""Long-context evaluations of a model: `jaxlc.evaluate`."""

import difflib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxlc.config.values import did_you_mean
from jaxlc.core.errors import UserError
from jaxlc.data.tokenizers import Tokenizer
from jaxlc.evals import needle, ruler
from jaxlc.evals.materials import prose_of
from jaxlc.evals.predictions import Case, Generate, run_case
from jaxlc.evals.ruler_questions import read_hotpotqa, read_squad
from jaxlc.evals.scoring import Score, match_all
from jaxlc.generation.generate_text import generator_of, stop_ids
from jaxlc.train.run_result import Result

NEEDLE, RULER = "needle", "ruler"
SCORES_FILE = "scores.jsonl"
_QUESTION_TASKS = ("qa_1", "qa_2")


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """What is evaluated.

    Raises:
      UserError: a task is unknown or a number is out of range.
    """

    tasks: tuple[str, ...] = (NEEDLE,)  # "needle", "ruler" (all its tasks), or names of RULER's tasks
    lengths: tuple[int, ...]  # in tokens, with the new tokens
    num_examples: int = 20  # of each task and length; of each depth with needle
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)  # of needle
    num_needles: int = 1  # in a text; one of them is asked for
    haystack: tuple[str, ...] = ()  # files with prose. Empty: docstrings of Python's standard library
    squad: str = ""  # data set of qa_1
    hotpotqa: str = ""  # data set of qa_2
    batch_size: int = 1  # examples that are generated together
    seed: int = 42

    def __post_init__(self):
        known = (NEEDLE, RULER, *ruler.TASKS)
        for task in self.tasks:
            if task not in known:
                nearest = difflib.get_close_matches(task, known, n=1)
                raise UserError(f"unknown task {task!r}: {did_you_mean(nearest, known)}")
        if not self.tasks or not self.lengths or min(self.lengths) < 1 or self.num_examples < 1 or self.batch_size < 1:
            raise UserError("an evaluation needs at least one task and one length, of 1 token or more, and one example")
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise UserError(f"invalid depths {self.depths}: expected numbers from 0 to 1")

    @property
    def ruler_tasks(self) -> list[str]:
        """The names of RULER's tasks. "ruler" includes a question task only if its data set is given."""
        available = [name for name in ruler.TASKS if name not in _QUESTION_TASKS or getattr(self, _data_set(name))]
        return list(
            dict.fromkeys(x for task in self.tasks for x in (available if task == RULER else [task]) if x != NEEDLE)
        )


def _data_set(task: str) -> str:
    return ruler.TASKS[task].settings["dataset"]


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One score; a line of scores.jsonl."""

    task: str
    haystack: str  # name of the prose
    length: int
    depth: float | None  # of needle
    num_needles: int | None  # of needle
    score: float  # percent
    standard_error: float
    num_examples: int
    seconds: float  # of this call; predictions of earlier calls take none

    @property
    def subject(self) -> tuple:
        """What was scored: a later score of the same subject replaces this one."""
        return self.task, self.haystack, self.length, self.depth, self.num_needles


def read_scores(out: Path) -> dict[str, list[ScoreRow]]:
    """The scores in `out`, by checkpoint: "step-100" and so on, earlier steps first."""
    directories = sorted(out.glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
    return {path.name: _read_rows(path / SCORES_FILE) for path in directories if (path / SCORES_FILE).exists()}


def _read_rows(path: Path) -> list[ScoreRow]:
    return [ScoreRow(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def evaluate_run(
    result: Result, settings: EvalSettings, out: Path, report: Callable[[ScoreRow], None] = lambda row: None
) -> list[ScoreRow]:
    """Evaluates the model of `result`; see `jaxlc.evaluate`."""
    prose = prose_of(settings.haystack)
    directory = out / f"step-{result.step}"
    identity = dict(
        model=str(result.workdir), step=result.step, tokenizer=result.tokenizer.fingerprint, seed=settings.seed,
        haystack=prose.name,
    )  # fmt: skip
    generate, is_primary = _generate_function(result), jax.process_index() == 0
    rows = []
    for task, length, depth, case in _cases(settings, prose, result.tokenizer):
        start = time.monotonic()
        score = run_case(case, generate, directory, identity, batch_size=settings.batch_size, writes=is_primary)
        num_needles = settings.num_needles if task == NEEDLE else None
        rows.append(_row(task, prose.name, length, depth, num_needles, score, time.monotonic() - start))
        report(rows[-1])
    if is_primary:
        by_subject = {row.subject: row for row in [*_read_rows(directory / SCORES_FILE), *rows]}
        (directory / SCORES_FILE).write_text("".join(json.dumps(vars(row)) + "\n" for row in by_subject.values()))
    return rows


def _cases(settings: EvalSettings, prose, tokenizer: Tokenizer) -> Iterator[tuple[str, int, float | None, Case]]:
    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text.encode()))

    materials = ruler.Materials(
        prose,
        squad=read_squad(settings.squad) if settings.squad else None,
        hotpotqa=read_hotpotqa(settings.hotpotqa) if settings.hotpotqa else None,
    )
    for length in settings.lengths:
        for depth in settings.depths if NEEDLE in settings.tasks else ():

            def make_needle(index: int, length=length, depth=depth):
                return needle.example(
                    length, depth, index, count_tokens, prose, num_needles=settings.num_needles, seed=settings.seed
                )

            case = Case(
                name=f"needle-{length}-{round(100 * depth)}-of-{settings.num_needles}",
                make=make_needle,
                match=match_all,
                num_examples=settings.num_examples,
                new_tokens=needle.NEW_TOKENS,
            )
            yield NEEDLE, length, depth, case
        for name in settings.ruler_tasks:

            def make_ruler(index: int, length=length, name=name):
                return ruler.example(name, index, length, count_tokens, materials, seed=settings.seed)

            task = ruler.TASKS[name]
            case = Case(
                name=f"{name}-{length}", make=make_ruler, match=task.match,
                num_examples=settings.num_examples, new_tokens=task.new_tokens,
            )  # fmt: skip
            yield name, length, None, case


def _generate_function(result: Result) -> Generate:
    generator, ends = generator_of(result), stop_ids(result)

    def generate(prompts: Sequence[str], new_tokens: int) -> list[str]:
        ids = [np.asarray(result.tokenizer.encode(prompt.encode())) for prompt in prompts]
        return [generation.text for generation in generator(ids, max_tokens=new_tokens, stop_ids=ends)]

    return generate


def _row(
    task: str,
    haystack: str,
    length: int,
    depth: float | None,
    num_needles: int | None,
    score: Score,
    seconds: float,
) -> ScoreRow:
    return ScoreRow(
        task=task, haystack=haystack, length=length, depth=depth, num_needles=num_needles, score=score.mean,
        standard_error=score.standard_error, num_examples=score.num_examples, seconds=round(seconds, 1),
    )  # fmt: skip
