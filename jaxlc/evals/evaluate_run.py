"""Long-context evaluations of a model: `jaxlc.evaluate`."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from jaxlc.checkpoints.checksums import model_fingerprint
from jaxlc.config import EvalsConfig
from jaxlc.config.checks.eval_checks import LOSS
from jaxlc.config.models.pretrained import locate
from jaxlc.core.errors import UserError
from jaxlc.core.identity import fingerprint_of
from jaxlc.core.paths import local_path
from jaxlc.data.tokens.stops import Stops
from jaxlc.data.tokens.tokenizers import load_tokenizer
from jaxlc.evals.cases import text_cases
from jaxlc.evals.document_loss import TokenLosses, evaluate_loss, read_cut_documents
from jaxlc.evals.example import Example
from jaxlc.evals.predictions import run_case
from jaxlc.evals.score_rows import ScoreRow, store_scores
from jaxlc.generation.generate_text import generator_of, stops_for, warn_beyond_context
from jaxlc.generation.generator import Generator
from jaxlc.generation.prompts import PromptEncoder, encoder_of
from jaxlc.train.result.run_result import Result

Report = Callable[[ScoreRow], None]
_CHECKED_TOKENS = 8192  # longer examples take long to make


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A model at one step of training."""

    encode: PromptEncoder
    token_losses: TokenLosses
    generator: Callable[[], Generator]  # the same one in every call
    stops: Stops
    directory: Path  # where its results are written
    fingerprint: str  # of parameters and settings, in the first line of its results, which must be equal to resume
    replaces: bool = False  # results of another identity are replaced instead of refused

    def evaluate(self, settings: EvalsConfig, report: Report) -> list[ScoreRow]:
        """Evaluates the model, writes the scores, and returns them; `report` is called with each score."""
        rows = []
        for row in self._rows(settings):
            rows.append(replace(row, model=self.fingerprint))
            report(row)
        if jax.process_index() == 0:
            store_scores(self.directory, rows)
        return rows

    def _rows(self, settings: EvalsConfig) -> Iterator[ScoreRow]:
        tokenizer = self.encode.tokenizer
        identity = dict(model=self.fingerprint, tokenizer=tokenizer.fingerprint, seed=settings.seed)
        template = self.encode.template
        if LOSS in settings.tasks:
            yield from evaluate_loss(
                settings, tokenizer, self._losses_after_start, self.directory, identity, self.replaces
            )
        for case, subject in text_cases(settings, self.encode.counter()):
            start = time.monotonic()
            score = run_case(
                case,
                self._generate,
                self.directory,
                identity | dict(template=template and fingerprint_of(template.source), stops=[*self.stops]),
                batch_size=settings.batch_size,
                replaces=self.replaces,
            )
            yield ScoreRow(**subject, **score._asdict(), seconds=round(time.monotonic() - start, 1), chat=settings.chat)

    def _losses_after_start(self, ids_BT: np.ndarray) -> np.ndarray:
        """`token_losses` of texts that start with the start tokens of the model, whose own losses do not count."""
        start_ids = self.encode.tokenizer.start_ids
        starts = np.broadcast_to(start_ids, (len(ids_BT), len(start_ids)))
        return self.token_losses(np.concatenate([starts, ids_BT], axis=1))[:, len(start_ids) :]

    def _generate(self, examples: Sequence[Example], new_tokens: int) -> list[str]:
        ids = [self.encode(example.prompt, example.answer_prefix) for example in examples]
        generations = self.generator()(ids, max_tokens=new_tokens, stop=self.stops.texts, stop_ids=self.stops.ids)
        return [generation.text for generation in generations]


def check_examples(settings: EvalsConfig, encode: PromptEncoder) -> None:
    """Makes an example of each task, without a model.

    Raises:
      UserError: a length is too small for a task, or a file cannot be used.
    """
    settings = replace(settings, num_examples=1)
    if LOSS in settings.tasks:
        read_cut_documents(settings, max(settings.lengths), encode.tokenizer)
    shortest = replace(settings, lengths=(min(*settings.lengths, _CHECKED_TOKENS),))
    for case, _ in text_cases(shortest, encode.counter()):
        case.make(0)


def check_before_loading(source: str | Path, settings: EvalsConfig) -> None:
    """As `check_examples`, with the tokenizer of a source whose weights are not read yet."""
    try:
        tokenizer = load_tokenizer(locate(str(source)).data_settings()["tokenizer"])
    except UserError:
        return  # which loading the source explains
    check_examples(settings, PromptEncoder(tokenizer=tokenizer))


def results_directory(source: str | Path) -> Path:
    """The default directory of the results for a workdir, a Hugging Face directory, or a hub id."""
    path = local_path(source)
    return (path if path.exists() else Path("runs") / path.name) / "evals"


def evaluate_run(
    result: Result,
    settings: EvalsConfig,
    out: Path,
    report: Report = lambda row: None,
    *,
    chat_template: str = "",
) -> list[ScoreRow]:
    """Evaluates the model of `result`; see `jaxlc.evaluate`."""
    warn_beyond_context(result, max(settings.lengths))
    encode = encoder_of(result, chat=settings.chat, chat_template=chat_template)
    model = EvaluatedModel(
        encode=encode,
        token_losses=result.model.token_losses,
        generator=lambda: generator_of(result),
        stops=stops_for(result, encode.template),
        directory=out / f"step-{result.step}",
        fingerprint=model_fingerprint(result.config, result.params),
    )
    return model.evaluate(settings, report)
