"""Long-context evaluations of a model: `jaxlc.evaluate`."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxlc.config import EvalsConfig
from jaxlc.config.eval_checks import LOSS
from jaxlc.data.tokenizers import Tokenizer
from jaxlc.evals.cases import text_cases
from jaxlc.evals.document_loss import TokenLosses, evaluate_loss
from jaxlc.evals.predictions import run_case
from jaxlc.evals.score_rows import ScoreRow, store_scores
from jaxlc.generation.generate_text import generator_of, stop_ids
from jaxlc.generation.generator import Generator
from jaxlc.train.run_result import Result

Report = Callable[[ScoreRow], None]


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A model at one step of training."""

    tokenizer: Tokenizer
    token_losses: TokenLosses
    generator: Callable[[], Generator]  # the same one in every call
    stop_ids: Sequence[int]
    directory: Path  # of its results
    identity: dict  # in the first line of its results, which must be equal if an evaluation resumes
    replaces: bool = False  # results of another identity are replaced instead of refused

    def evaluate(self, settings: EvalsConfig, report: Report) -> list[ScoreRow]:
        """Evaluates the model, writes the scores, and returns them; `report` is called with each score."""
        rows = []
        for row in self._rows(settings):
            rows.append(row)
            report(row)
        if jax.process_index() == 0:
            store_scores(self.directory, rows)
        return rows

    def _rows(self, settings: EvalsConfig) -> Iterator[ScoreRow]:
        identity = self.identity | dict(seed=settings.seed)
        if LOSS in settings.tasks:
            yield from evaluate_loss(
                settings, self.tokenizer, self.token_losses, self.directory, identity, self.replaces
            )
        for text_case in text_cases(settings, lambda text: len(self._encoded(text))):
            start = time.monotonic()
            score = run_case(
                text_case.case,
                self._generate,
                self.directory,
                identity | dict(haystack=text_case.haystack),
                batch_size=settings.batch_size,
                replaces=self.replaces,
            )
            yield ScoreRow(
                task=text_case.task, haystack=text_case.haystack, length=text_case.length, depth=text_case.depth,
                num_needles=text_case.num_needles, score=score.mean, standard_error=score.standard_error,
                num_examples=score.num_examples, seconds=round(time.monotonic() - start, 1),
            )  # fmt: skip

    def _encoded(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(text.encode()))

    def _generate(self, prompts: Sequence[str], new_tokens: int) -> list[str]:
        ids = [self._encoded(prompt) for prompt in prompts]
        generations = self.generator()(ids, max_tokens=new_tokens, stop_ids=self.stop_ids)
        return [generation.text for generation in generations]


def evaluate_run(result: Result, settings: EvalsConfig, out: Path, report: Report = lambda row: None) -> list[ScoreRow]:
    """Evaluates the model of `result`; see `jaxlc.evaluate`."""
    model = EvaluatedModel(
        tokenizer=result.tokenizer,
        token_losses=result.model.token_losses,
        generator=lambda: generator_of(result),
        stop_ids=stop_ids(result.tokenizer, result.workdir),
        directory=out / f"step-{result.step}",
        identity=dict(model=str(result.workdir), step=result.step, tokenizer=result.tokenizer.fingerprint),
    )
    return model.evaluate(settings, report)
