"""Long-context evaluations of a model: `jaxlc.evaluate`."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxlc.config import EvalsConfig
from jaxlc.config.eval_checks import LOSS
from jaxlc.evals.cases import text_cases
from jaxlc.evals.document_loss import evaluate_loss
from jaxlc.evals.predictions import Generate, run_case
from jaxlc.evals.score_rows import ScoreRow, store_scores
from jaxlc.generation.generate_text import generator_of, stop_ids
from jaxlc.train.run_result import Result


def evaluate_run(
    result: Result, settings: EvalsConfig, out: Path, report: Callable[[ScoreRow], None] = lambda row: None
) -> list[ScoreRow]:
    """Evaluates the model of `result`; see `jaxlc.evaluate`."""
    directory = out / f"step-{result.step}"
    identity = dict(
        model=str(result.workdir), step=result.step, tokenizer=result.tokenizer.fingerprint, seed=settings.seed
    )
    rows = []
    for row in itertools.chain(
        _loss_rows(result, settings, directory, identity), _text_rows(result, settings, directory, identity)
    ):
        rows.append(row)
        report(row)
    if jax.process_index() == 0:
        store_scores(directory, rows)
    return rows


def _loss_rows(result: Result, settings: EvalsConfig, directory: Path, identity: dict) -> Iterator[ScoreRow]:
    if LOSS in settings.tasks:
        yield from evaluate_loss(settings, result.tokenizer, result.model.token_losses, directory, identity)


def _text_rows(result: Result, settings: EvalsConfig, directory: Path, identity: dict) -> Iterator[ScoreRow]:
    tokenizer = result.tokenizer
    cases = text_cases(settings, lambda text: len(tokenizer.encode(text.encode())))
    generate = None
    for text_case in cases:
        generate = generate or _generate_function(result)
        start = time.monotonic()
        score = run_case(
            text_case.case,
            generate,
            directory,
            identity | dict(haystack=text_case.haystack),
            batch_size=settings.batch_size,
        )
        yield ScoreRow(
            task=text_case.task, haystack=text_case.haystack, length=text_case.length, depth=text_case.depth,
            num_needles=text_case.num_needles, score=score.mean, standard_error=score.standard_error,
            num_examples=score.num_examples, seconds=round(time.monotonic() - start, 1),
        )  # fmt: skip


def _generate_function(result: Result) -> Generate:
    generator, ends = generator_of(result), stop_ids(result)

    def generate(prompts: Sequence[str], new_tokens: int) -> list[str]:
        ids = [np.asarray(result.tokenizer.encode(prompt.encode())) for prompt in prompts]
        return [generation.text for generation in generator(ids, max_tokens=new_tokens, stop_ids=ends)]

    return generate
