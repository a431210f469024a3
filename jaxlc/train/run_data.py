"""The sequences of a run: the corpus of the config, or user-provided batches."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.sharding import NamedSharding

from jaxlc.config import Config, Stage
from jaxlc.core.errors import UserError
from jaxlc.core.files import displayed, local_path
from jaxlc.data import Corpus, open_corpus
from jaxlc.data.report import share_lines
from jaxlc.data.sequences.loader import Sequences, WaitingTime, array_dtypes, batches
from jaxlc.data.sequences.mixture import BalancedSequences
from jaxlc.data.sequences.user_batches import EndOfBatches, ListedSequences, StreamedSequences
from jaxlc.data.tokens.tokenizers import Tokenizer, tokenizer_of
from jaxlc.data.traces.open_traces import open_traces
from jaxlc.data.traces.rollout_files import RolloutSequences
from jaxlc.step.batch import BATCH_SPEC
from jaxlc.step.step import TrainStep
from jaxlc.train.evaluation import FiniteSequences
from jaxlc.train.reports.progress import Progress
from jaxlc.train.reports.start_report import corpus_lines, start_token_lines
from jaxlc.train.rollouts import DIRECTORY, together

CALLER_BATCHES = "batches of the caller"  # in the meta of a checkpoint instead of the fingerprint of a corpus

Batches = Iterable[Mapping]  # each maps "tokens" and optional names to arrays [sequences, tokens]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Training and held-out sequences, and the tokenizer."""

    tokenizer: Tokenizer
    train: Sequences
    heldout: FiniteSequences | None  # None: the run does not evaluate
    fingerprint: str  # equal for two runs if all sequences are equal
    lines: list[str]  # description, printed at the start of the run
    corpus: Corpus | None = field(default=None, repr=False)  # None: user-provided batches
    waiting: WaitingTime = field(default_factory=WaitingTime, repr=False)  # while the loop waits for `batches`

    def batches(
        self, step: TrainStep, next_sequence: int, num_steps: int, stop: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[dict[str, jax.Array], bool]]:
        """Yields the arrays of `num_steps` optimizer steps from `next_sequence` on, and whether it is the last one.

        Args:
          stop: several processes that wait for rollouts call it together; the iterator ends when it is not None.
        """
        train, sequences = step.config.train, self.train
        if self.corpus is not None and step.config.attention.document_mask:
            sequences = BalancedSequences(self.corpus.train, step.config, next_sequence)
        stream = batches(
            sequences,
            first_sequence=next_sequence,
            global_batch_size=train.global_batch_size,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            seq_len=step.config.data.seq_len,
            arranged=step.sequence_order.arranged,
            sharding=NamedSharding(step.mesh, BATCH_SPEC),
            prefetch_steps=step.config.data.prefetch_steps,
        )
        with contextlib.closing(stream), contextlib.ExitStack() as stack:
            stack.callback(self.stop_waiting)  # before the stream is closed, whose threads may wait for a file
            if self.is_endless:  # unless `stop_waiting` was called
                items: Iterator = _until_end(stream)
                if isinstance(self.train, RolloutSequences) and jax.process_count() > 1:
                    items = together(items, self.train, next_sequence // train.global_batch_size + 1, stop)
                timed = self.waiting.timed(items)
                yield from ((arrays, count == num_steps) for count, arrays in enumerate(timed, start=1))
            else:
                yield from self.waiting.timed(_marking_last(itertools.islice(_until_end(stream), num_steps)))

    @property
    def is_endless(self) -> bool:
        """Whether there are always more training sequences, unlike in batches of the caller."""
        return not isinstance(self.train, StreamedSequences)

    def stop_waiting(self) -> None:
        """Ends `batches` if it waits for rollouts."""
        if isinstance(self.train, RolloutSequences):
            self.train.close()


def _until_end(stream: Iterator) -> Iterator:
    with contextlib.suppress(EndOfBatches):
        yield from stream


def _marking_last(stream: Iterator) -> Iterator:
    """Yields (item, whether it is the last one); reads one item ahead."""
    current = next(stream, None)
    while current is not None:
        following = next(stream, None)
        yield current, following is None
        current = following


def open_data(
    stage: Stage,
    progress: Progress,
    user_batches: Batches | None = None,
    eval_batches: Batches | None = None,
    workdir: Path = Path(),
    *,
    has_custom_model: bool = False,
) -> RunData:
    """Opens the corpus of a stage, or wraps user-provided batches; see `jaxlc.train.run`.

    Raises:
      UserError: the data cannot be read, or does not match the config.
    """
    if user_batches is None and eval_batches is not None:
        raise UserError("eval_batches without batches: pass both, or neither to train on the corpus of config.data")
    if user_batches is not None and stage.config.rollouts.source:
        raise UserError(
            f"batches with config.rollouts.source={stage.config.rollouts.source!r}: pass one of them; rollouts replace"
            " batches"
        )
    if user_batches is not None:
        return _from_batches(stage.config, user_batches, eval_batches, has_custom_model)
    if stage.config.rollouts.source:
        return _from_rollouts(stage, progress, workdir)
    if stage.config.data.traces:
        return _from_traces(stage.config, progress)
    if stage.config.posttrain.loss:
        raise UserError(
            f"config.posttrain.loss={stage.config.posttrain.loss!r} without traces: set config.data.traces, or pass"
            " batches to jaxlc.train.run"
        )
    return _from_corpus(stage.config, progress, stage.num_steps)


def _from_corpus(config: Config, progress: Progress, num_steps: int) -> RunData:
    tokenizer = load_matching_tokenizer(config)
    with progress.progress_bar("reading the corpus") as update:
        corpus = open_corpus(config.data, update, progress.log, tokenizer, config.model.vocab_size)
    for warning in corpus.warnings:
        progress.log(f"warning: {warning}")
    return RunData(
        tokenizer=corpus.tokenizer,
        train=corpus.train,
        heldout=corpus.heldout,
        fingerprint=corpus.fingerprint,
        lines=[
            *corpus_lines(config, corpus, num_steps),
            *start_token_lines(tokenizer),
            *share_lines(corpus, num_steps * config.train.global_batch_size),
        ],
        corpus=corpus,
    )


def _from_rollouts(stage: Stage, progress: Progress, workdir: Path) -> RunData:
    config = stage.config
    if stage.first_step or stage.num_steps != config.train.steps:
        raise UserError("unsupported: config.rollouts with config.stages; run the stages one after the other")
    tokenizer = load_matching_tokenizer(config)
    directory = local_path(config.rollouts.directory) if config.rollouts.directory else workdir / DIRECTORY
    return RunData(
        tokenizer=tokenizer,
        train=RolloutSequences(directory, config, tokenizer, progress.log),
        heldout=None,
        fingerprint="rollouts",  # the files are in the order of the steps
        lines=[f"data       rollouts in {displayed(directory)}; no evaluation", *start_token_lines(tokenizer)],
    )


def _from_traces(config: Config, progress: Progress) -> RunData:
    tokenizer = load_matching_tokenizer(config)
    with progress.progress_bar("reading the traces"):
        traces = open_traces(config, tokenizer)
    for warning in traces.warnings:
        progress.log(f"warning: {warning}")
    return RunData(
        tokenizer=tokenizer,
        train=traces.train,
        heldout=traces.heldout,
        fingerprint=traces.fingerprint,
        lines=[f"data       {traces.description}", *start_token_lines(tokenizer)],
    )


def load_matching_tokenizer(config: Config) -> Tokenizer:
    """Loads the tokenizer of `config`. That of a pretrained model may have tokens that the model lacks; the readers of
    data and prompts refuse them where they occur.

    Raises:
      UserError: it cannot be loaded, or the model has too few tokens.
    """
    tokenizer = tokenizer_of(config.data)
    is_pretrained = bool(config.model.init_from)
    always_used = [tokenizer.end_of_document_id, *tokenizer.start_ids.tolist()]
    num_needed = max(always_used) + 1 if is_pretrained else tokenizer.vocab_size
    if num_needed > config.model.vocab_size:
        advice = f"set --config.model.vocab_size={num_needed}"
        if is_pretrained:
            advice = "set --config.data.tokenizer to the tokenizer of config.model.init_from"
        raise UserError(
            f"the tokenizer {config.data.tokenizer} has {num_needed} tokens and the model"
            f" {config.model.vocab_size}; {advice}"
        )
    return tokenizer


def _from_batches(
    config: Config, user_batches: Batches, eval_batches: Batches | None, has_custom_model: bool
) -> RunData:
    options = dict(
        seq_len=config.data.seq_len,
        vocab_size=config.model.vocab_size,
        dtypes=array_dtypes(config),
        absolute_positions=has_custom_model,
    )
    heldout = None if eval_batches is None else ListedSequences(eval_batches, **options)
    evaluated = "no evaluation" if heldout is None else f"held out: {heldout.num_sequences:,} sequences"
    train = StreamedSequences(
        user_batches,
        batch_size=config.train.global_batch_size,
        prefetch_steps=config.data.prefetch_steps,
        **options,
    )
    try:
        train[0]  # raises an error before the step is compiled
    except EndOfBatches:
        raise UserError("batches is empty: pass an iterable that starts with the batch of step 1") from None
    return RunData(
        tokenizer=tokenizer_of(config.data),
        train=train,
        heldout=heldout,
        fingerprint=CALLER_BATCHES,
        lines=[f"data       {CALLER_BATCHES}; {evaluated}"],
    )
