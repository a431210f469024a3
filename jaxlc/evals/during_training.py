"""Evaluations during training: `config.evals`, with the live parameters and in the same process."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from jaxlc.checkpoints.checksums import model_fingerprint
from jaxlc.config.checks.eval_checks import lengths_in_training
from jaxlc.config.models.pretrained import original_of
from jaxlc.core.errors import UserError
from jaxlc.data.tokens.fitting_template import fitting_template
from jaxlc.data.tokens.stops import stops_of
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.evals.evaluate_run import EvaluatedModel, check_examples
from jaxlc.evals.pictures import draw_maps, draw_overlays
from jaxlc.evals.score_rows import ScoreRow, step_directories
from jaxlc.generation.generator import Generator
from jaxlc.generation.prompts import PromptEncoder
from jaxlc.step.language_model import LanguageModel
from jaxlc.step.step import TrainStep
from jaxlc.train.evaluation.scorer import NamedScore


class TrainingScorer:
    """The scorer of a stage; see `jaxlc.train.evaluation.scorer.Scorer`.

    Losses of documents use the live parameters. Generation copies them once in the compute dtype, sharded as they are,
    and frees the copy after the evaluation; the KV cache is sharded over context and tensor. Compiled programs remain.
    """

    def __init__(self, step: TrainStep, tokenizer: Tokenizer):
        self._step, self._tokenizer = step, tokenizer
        self._settings = dataclasses.replace(step.config.evals, lengths=lengths_in_training(step.config))
        template = fitting_template(step.config.data.chat_template, tokenizer) if self._settings.chat else None
        self._encode = PromptEncoder(tokenizer=tokenizer, template=template)
        self._model: LanguageModel | None = None
        self._generator: Generator | None = None

    def check(self) -> None:
        try:
            check_examples(self._settings, self._encode)
        except UserError as error:
            raise UserError(f"config.evals: {error}") from error

    def __call__(self, params: dict, step: int, workdir: Path, log: Callable[[str], None]) -> list[NamedScore]:
        out, is_copied, config = workdir / "evals", False, self._step.config
        params = jax.tree.map(_strongly_typed, params)

        def generator() -> Generator:
            nonlocal is_copied
            if not is_copied:
                if self._generator is None:
                    self._generator = Generator(self._step, params, self._tokenizer)
                else:
                    self._generator.set_params(params)
                is_copied = True
            return self._generator

        if self._model is None:
            self._model = LanguageModel(self._step, params, self._tokenizer)
        self._model.params = params
        evaluated = EvaluatedModel(
            encode=self._encode,
            token_losses=self._model.token_losses,
            generator=generator,
            stops=stops_of(
                config, self._tokenizer, original_of(config.model.init_from, workdir), self._encode.template
            ),
            directory=out / f"step-{step}",
            fingerprint=model_fingerprint(config, params),
            replaces=True,
        )
        try:
            rows = evaluated.evaluate(self._settings, report=lambda row: log(str(row)))
        finally:  # the next training step donates the parameters
            self._model.params = None
            if is_copied:
                self._generator.set_params(None)
        if jax.process_index() == 0:
            draw_maps(rows, out)
            draw_overlays({path.name: path for path in step_directories(out)}, out)
        return list(_named(rows))


def _strongly_typed(x: jax.Array) -> jax.Array:
    """The initial norm scales are weakly typed, and trained ones are not: programs would be compiled twice."""
    return x.astype(x.dtype) if x.weak_type else x


def _named(rows: Sequence[ScoreRow]) -> Iterator[NamedScore]:
    """Yields one score per task and length: the mean over depths, with its standard error."""
    groups: dict[str, list[ScoreRow]] = {}
    for row in rows:
        groups.setdefault(f"{row.task}@{row.length}", []).append(row)
    for name, group in groups.items():
        count = len(group)
        yield NamedScore(
            name=name,
            score=sum(row.score for row in group) / count,
            standard_error=math.sqrt(sum(row.standard_error**2 for row in group)) / count,
            num_examples=sum(row.num_examples for row in group),
            seconds=sum(row.seconds for row in group),
        )
