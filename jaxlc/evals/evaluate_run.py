"""Long-context evaluations of a model: `jaxlc.evaluate`, and `config.evals` during training, with
the live parameters and in the same process.

The cases that are scored by generated text are needle, passkey and RULER. Needle and passkey are a
number at a chosen depth of a text of an exact length. Needle in a haystack hides it in prose
(Kamradt 2023). The passkey task hides it in a text without meaning, a group of sentences that is
repeated (Mohtashami and Jaggi 2023, arXiv:2305.16300, section 4.2); the wording is ours.
"""

import bisect
import contextlib
import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlc.checkpoints.files import model_fingerprint
from jaxlc.config import EvalsConfig
from jaxlc.config.checks.stage_checks import LOSS, NEEDLE, PASSKEY, RULER, lengths_in_training
from jaxlc.config.models.pretrained import locate
from jaxlc.core import Log, UserError
from jaxlc.core.files import fingerprint_of, local_path, locked, locked_at_once
from jaxlc.data.tokens.chat_templates import fitting_template
from jaxlc.data.tokens.encoder import Stops, stops_of
from jaxlc.data.tokens.tokenizers import Tokenizer, load_tokenizer
from jaxlc.evals import ruler
from jaxlc.evals.document_loss import loss_rows, losses_of, read_cut_documents
from jaxlc.evals.figures import draw_maps, draw_overlays
from jaxlc.evals.haystack import (
    CountTokens,
    Example,
    Prose,
    largest_example,
    prose_of,
    sentences_of,
)
from jaxlc.evals.predictions import (
    Case,
    Predictions,
    ScoreRow,
    match_all,
    run_case,
    step_directories,
    store_scores,
)
from jaxlc.generation.generate_text import (
    PromptEncoder,
    encoder_of,
    generator_of,
    stops_for,
    warn_beyond_context,
)
from jaxlc.generation.generator import Generator
from jaxlc.runtime import watchdog
from jaxlc.runtime.watchdog import on_process_0
from jaxlc.step.language_model import LanguageModel, TrainedModel
from jaxlc.step.step import TrainStep

NEW_TOKENS = 16
_NEEDLE = "The secret number of {name} is {value}."
_QUESTION = "\n\nWhat is the secret number of {name}?"
_PREFIX = " The secret number of {name} is"
_NAMES = (
    "Alma",
    "Boris",
    "Clara",
    "Daniel",
    "Edith",
    "Felix",
    "Greta",
    "Henry",
    "Ines",
    "Jonas",
    "Karla",
    "Leo",
)
_WORDS_PER_SIZE = 4

_KEY_INTRODUCTION = (
    "A pass key is hidden in a long text without meaning. Find it and remember it.\n\n"
)
_KEY_FILLER = (
    "Rain falls on the roof. The river runs past the mill. Smoke rises from the"
    " chimney. The wind turns the leaves."
)
_KEY = "The pass key is {key}. Remember that {key} is the pass key."
_KEY_QUESTION = "\n\nWhat is the pass key?"
_KEY_PREFIX = " The pass key is"


def needle_example(
    length: int,
    depth: float,
    index: int,
    count_tokens: CountTokens,
    prose: Prose,
    *,
    num_needles: int = 1,
    seed: int = 0,
) -> Example:
    """A text in which the number of one name is asked.

    Args:
      length: tokens of the prompt and of the new tokens together, which are not exceeded.
      depth: 0 .. 1, of the needle that is asked for, between two sentences of the text; other needles are anywhere.
      num_needles: numbers of different names; at most 12.
    Raises:
      UserError: the length is too small.
    """

    def make(size: int) -> Example:
        rng = random.Random(f"{seed} {length} {depth} {index}")
        names = rng.sample(_NAMES, num_needles)
        values = [str(value) for value in rng.sample(range(10**6, 10**7), num_needles)]
        depths = [depth, *(rng.random() for _ in names[1:])]
        sentences = sentences_of(" ".join(prose.first(size * _WORDS_PER_SIZE)))
        needles = sorted(zip(depths, names, values), reverse=True)
        ends = list(itertools.accumulate(map(len, sentences)))
        for at, name, value in needles:
            sentences.insert(
                bisect.bisect(ends, at * ends[-1]), _NEEDLE.format(name=name, value=value)
            )
        asked = {"name": names[0]}
        return Example(
            prompt=" ".join(sentences) + _QUESTION.format(**asked),
            answer_prefix=_PREFIX.format(**asked),
            references=(values[0],),
            depth=depth,
        )

    return largest_example(
        make, count_tokens, length, new_tokens=NEW_TOKENS, smallest=1, task="needle"
    )


def passkey_example(
    length: int, depth: float, index: int, count_tokens: CountTokens, *, seed: int = 0
) -> Example:
    """A text with a pass key of five digits, which is asked for at the end.

    Args:
      length: tokens of the prompt and of the new tokens together, which are not exceeded.
      depth: 0 .. 1, of the pass key among the groups of filler sentences.
    Raises:
      UserError: the length is too small.
    """
    key = str(random.Random(f"{seed} passkey {length} {depth} {index}").randrange(10_000, 100_000))

    def make(size: int) -> Example:
        parts = [_KEY_FILLER] * size
        parts.insert(round(depth * size), _KEY.format(key=key))
        return Example(
            prompt=_KEY_INTRODUCTION + " ".join(parts) + _KEY_QUESTION,
            answer_prefix=_KEY_PREFIX,
            references=(key,),
            depth=depth,
        )

    return largest_example(
        make, count_tokens, length, new_tokens=NEW_TOKENS, smallest=1, task="passkey"
    )


def text_cases(
    settings: EvalsConfig, count_tokens: CountTokens
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yields the cases of each length, in the order needle, passkey, RULER, and what they score:
    fields of `ScoreRow`.

    Raises:
      UserError: a file with prose or questions cannot be read.
    """
    prose = prose_of(settings.haystack)
    ruler_tasks = _ruler_tasks(settings)
    options = dict(count_tokens=count_tokens, seed=settings.seed)
    materials = ruler.Materials(
        prose,
        squad=ruler.read_squad(settings.squad) if settings.squad else None,
        hotpotqa=ruler.read_hotpotqa(settings.hotpotqa) if settings.hotpotqa else None,
    )
    for length in settings.lengths:
        needle_settings = dict(prose=prose, num_needles=settings.num_needles)
        for name, example, own, haystack, num_needles in (
            (NEEDLE, needle_example, needle_settings, prose.name, settings.num_needles),
            (PASSKEY, passkey_example, {}, "", None),
        ):
            suffix = "" if num_needles is None else f"-of-{num_needles}"
            for depth in settings.depths if name in settings.tasks else ():
                depth_case = Case(
                    name=f"{name}-{length}-{100 * depth:g}{suffix}",
                    make=partial(example, length, depth, **own, **options),
                    match=match_all,
                    num_examples=settings.num_examples,
                    new_tokens=NEW_TOKENS,
                    data=fingerprint_of(prose.words if own else ""),
                )
                yield (
                    depth_case,
                    dict(
                        task=name,
                        haystack=haystack,
                        length=length,
                        depth=depth,
                        num_needles=num_needles,
                    ),
                )
        for name in ruler_tasks:
            task = ruler.TASKS[name]
            questions = getattr(materials, task.settings.get("dataset", ""), None)
            case = Case(
                name=f"{name}-{length}",
                make=partial(ruler.example, name, length=length, materials=materials, **options),
                match=task.match,
                num_examples=settings.num_examples,
                new_tokens=task.new_tokens,
                data=fingerprint_of(questions or prose.words),
            )
            yield case, dict(task=name, haystack=prose.name, length=length)


def _ruler_tasks(settings: EvalsConfig) -> list[str]:
    """The names of RULER's tasks. "ruler" includes a question task only if its data set is given."""
    available = [
        name
        for name, task in ruler.TASKS.items()
        if task.kind != "qa" or getattr(settings, task.settings["dataset"])
    ]
    names = (name for task in settings.tasks for name in (available if task == RULER else [task]))
    return list(dict.fromkeys(name for name in names if name in ruler.TASKS))


Report = Callable[[ScoreRow], None]
_CHECKED_TOKENS = 8192  # longer examples take long to make


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A model at one step of training."""

    model: LanguageModel
    encode: PromptEncoder
    generator: Callable[[], Generator]  # the same one in every call
    stops: Stops
    directory: Path  # where its results are written
    # During training: prints a line. Results of another identity are replaced, and another evaluation into
    # the directory is waited for. None: both are refused.
    log: Log | None = None

    def evaluate(self, settings: EvalsConfig, report: Report) -> list[ScoreRow]:
        """Evaluates the model, writes the scores, and returns them; `report` is called with each
        score.

        Raises:
          LockHeld: another evaluation writes to the directory; the scores of one would be lost.
        """
        with contextlib.ExitStack() as lock:
            with watchdog.phase("another evaluation", repeats=False):
                on_process_0(lambda: lock.enter_context(self._locked()))
            fingerprint = model_fingerprint(self.model.config, self.model.params)
            rows = []
            for row in self._rows(settings, fingerprint):
                rows.append(replace(row, model=fingerprint))
                report(rows[-1])
            if jax.process_index() == 0:
                store_scores(self.directory, rows)
            return rows

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        """Holds the lock of the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "evaluation.lock"
        if (log := self.log) is not None:
            return locked(
                path, lambda holder: log(f"waiting for {holder}, which writes to {self.directory}")
            )
        problem = f" writes to {self.directory}: wait for its end, or use another --out"
        return locked_at_once(path, problem)

    def _rows(self, settings: EvalsConfig, fingerprint: str) -> Iterator[ScoreRow]:
        tokenizer = self.encode.tokenizer
        template = self.encode.template
        identity = dict(model=fingerprint, tokenizer=tokenizer.fingerprint, seed=settings.seed)
        predictions = Predictions(
            directory=self.directory,
            identity=dict(identity),
            batch_size=settings.batch_size,
            replaces=self.log is not None,
        )
        documents_name = "+".join(Path(path).stem for path in settings.documents)
        for length in settings.lengths if LOSS in settings.tasks else ():
            start = time.monotonic()
            documents = read_cut_documents(settings, length, tokenizer)
            losses = losses_of(documents, settings, self._losses_after_start, predictions)
            yield from loss_rows(losses, documents_name, time.monotonic() - start)
        identity |= dict(template=template and fingerprint_of(template.source), stops=[*self.stops])
        predictions = replace(predictions, identity=identity)
        for case, subject in text_cases(settings, self.encode.counter()):
            start = time.monotonic()
            score = run_case(case, self._generate, predictions)
            yield ScoreRow(
                **subject,
                **score._asdict(),
                seconds=round(time.monotonic() - start, 1),
                chat=settings.chat,
            )

    def _losses_after_start(self, ids_BT: np.ndarray) -> np.ndarray:
        """The losses of texts that start with the start tokens of the model, whose own losses
        do not count.
        """
        start_ids = self.encode.tokenizer.start_ids
        starts = np.broadcast_to(start_ids, (len(ids_BT), len(start_ids)))
        return self.model.token_losses(np.concatenate([starts, ids_BT], axis=1))[
            :, len(start_ids) :
        ]

    def _generate(self, examples: Sequence[Example], new_tokens: int) -> list[str]:
        ids = [self.encode(example.prompt, example.answer_prefix) for example in examples]
        generations = self.generator()(ids, max_tokens=new_tokens, stops=self.stops)
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
    result: TrainedModel,
    settings: EvalsConfig,
    out: Path,
    report: Report,
    *,
    chat_template: str,
) -> list[ScoreRow]:
    """Evaluates the model of `result`; see `jaxlc.evaluate`.

    Raises:
      LockHeld: as `EvaluatedModel.evaluate`.
    """
    warn_beyond_context(result, max(settings.lengths))
    encode = encoder_of(result, chat=settings.chat, chat_template=chat_template)
    model = EvaluatedModel(
        model=result.model,
        encode=encode,
        generator=lambda: generator_of(result),
        stops=stops_for(result, encode.template),
        directory=out / f"step-{result.step}",
    )
    return model.evaluate(settings, report)


class NamedScore(NamedTuple):
    """A mean over examples or documents."""

    name: str  # TASK@LENGTH
    score: float  # percent, or nats per token
    standard_error: float  # NaN for one example
    num_examples: int
    seconds: float


class TrainingScorer:
    """Computes the scores of config.evals. Its programs are compiled once, for all evaluations of a
    stage.

    Losses of documents use the live parameters. Generation copies them once in the compute dtype,
    sharded as they are, and frees the copy after the evaluation; the KV cache is sharded over
    context and tensor. Compiled programs remain.
    """

    def __init__(self, step: TrainStep, tokenizer: Tokenizer):
        """
        Raises:
          Unsupported: a custom model.
        """
        self._step = step
        self._settings = replace(step.config.evals, lengths=lengths_in_training(step.config))
        template = (
            fitting_template(step.config.data.chat_template, tokenizer)
            if self._settings.chat
            else None
        )
        self._encode = PromptEncoder(tokenizer=tokenizer, template=template)
        self._model = LanguageModel(step, None, tokenizer)
        self._generator = Generator(step, None, tokenizer)

    def check(self) -> None:
        """Makes an example of each task, without a model.

        Raises:
          UserError: a file cannot be read, or a task has no example of the lengths.
        """
        try:
            check_examples(self._settings, self._encode)
        except UserError as error:
            raise UserError(f"config.evals: {error}") from error

    def __call__(self, params: dict, step: int, workdir: Path, log: Log) -> list[NamedScore]:
        """Evaluates the parameters of `step` and writes predictions, scores and figures to
        `workdir`/evals.

        Predictions of the same parameters that an interrupted evaluation has stored there are used.
        Every process of a run makes the same call.

        Args:
          log: prints a line.
        """
        out = workdir / "evals"
        config = self._step.config
        # The initial norm scales are weakly typed, and trained ones are not: programs would be
        # compiled twice.
        params = jax.tree.map(lambda x: x.astype(x.dtype) if x.weak_type else x, params)
        self._model.params = params

        @functools.cache  # losses need no copy of the parameters
        def generator() -> Generator:
            self._generator.set_params(params)
            return self._generator

        evaluated = EvaluatedModel(
            model=self._model,
            encode=self._encode,
            generator=generator,
            stops=stops_of(config, self._encode.tokenizer, workdir, self._encode.template),
            directory=out / f"step-{step}",
            log=log,
        )
        try:
            rows = evaluated.evaluate(self._settings, report=lambda row: log(str(row)))
        finally:  # the next training step donates the parameters
            self._model.params = None
            self._generator.set_params(None)
        if jax.process_index() == 0:
            draw_maps(rows, out)
            draw_overlays({path.name: path for path in step_directories(out)}, out)
        return list(_named(rows))


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
