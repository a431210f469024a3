"""The contract of a data source: what a run trains on and is evaluated on, and what `jaxlc data`
shows of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxlc.core.text import Update, count_text, no_progress
from jaxlc.data.tokens.tokenizers import Tokenizer

# a larger fraction of the data without a loss is worth a warning, and one of invalid text an error
MANY = 0.1

Batches = Iterable[Mapping]  # each maps "tokens" and optional names to arrays [sequences, tokens]


class Sequences(Protocol):
    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns sequence i, for any i >= 0, in natural order, arrays [S]. Called from several
        threads.
        """


class FiniteSequences(Sequences, Protocol):
    num_sequences: int  # distinct sequences: those with indices from 0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a data source is opened with, besides the config."""

    tokenizer: Tokenizer
    vocab_size: int  # documents have smaller tokens
    workdir: Path = Path()
    batches: Batches | None = None
    eval_batches: Batches | None = None
    absolute_positions: bool = False  # of batches; see `complete_batch`
    progress: Callable[[str], AbstractContextManager[Update]] = lambda what: nullcontext(
        no_progress
    )
    log: Callable[[str], None] = lambda line: None


class ShownTokens(NamedTuple):
    """A document, trace or prompt, or the part of it that is in a sequence."""

    title: str
    tokens: np.ndarray  # int [tokens]
    has_loss: np.ndarray  # bool [tokens]: whether the token after each one is predicted with a loss
    depth: int = 0  # in a tree of traces


class SourceView(NamedTuple):
    """A named part of a data source, for `jaxlc data show` and `jaxlc data report`."""

    name: str  # the setting, or the name of a source of data.mixture
    unit: str  # document, trace or prompt
    lengths: np.ndarray  # int64 [documents]: tokens of training and held-out documents
    num_loss_tokens: int
    # In the order of training: one document, all traces of a group, or one prompt.
    examples: Iterator[Sequence[ShownTokens]]


class SourceShare(NamedTuple):
    """The part of a source in the first sequences of a run."""

    name: str  # the setting, or the name of a source of data.mixture
    share: float  # fraction of the tokens, as set
    realized_share: float  # fraction of the tokens in those sequences
    num_tokens: int  # in those sequences, without padding
    num_epochs: float
    num_documents: int  # per epoch
    epoch_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.share:.2%} of the tokens, {self.realized_share:.2%} in this run;"
            f" {count_text(self.num_documents, 'document')}, {count_text(self.epoch_tokens, 'token')},"
            f" {self.num_epochs:.3g} epochs"
        )


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Training and held-out sequences, and their tokenizer."""

    tokenizer: Tokenizer
    train: Sequences
    heldout: FiniteSequences | None = None  # None: the run does not evaluate
    fingerprint: str  # equal for two sources if all their sequences are equal
    description: str = ""  # one line for the start of a run
    warnings: tuple[str, ...] = ()  # one line each, for the caller to print once per run

    @property
    def epoch_sequences(self) -> int | None:
        """Sequences of one epoch; None: there are no epochs."""
        return None

    def views(self) -> Sequence[SourceView]:
        """The parts that `jaxlc data` shows.

        Raises:
          UserError: they do not exist before the run.
        """
        raise NotImplementedError

    def shares(self, num_sequences: int) -> Sequence[SourceShare]:
        """The parts of the first `num_sequences` training sequences; none if they are not known
        before the run.
        """
        return ()

    def details(self) -> Sequence[str]:
        """More lines for `jaxlc data report`."""
        return ()

    def position(self, num_sequences: int) -> dict[str, Any]:
        """What a checkpoint after the first `num_sequences` stores of the source, as JSON."""
        return {}

    def resume(self, meta: Mapping[str, Any], next_sequence: int) -> None:
        """Prepares training from `next_sequence` on.

        Args:
          meta: of the checkpoint, which has `position`; empty before the first step of a stage.
        Raises:
          UserError: the data differs from that of the checkpoint, or cannot be read.
        """

    def stop_waiting(self) -> None:
        """Ends the iteration over batches if it waits for another program."""

    def close(self) -> None:
        """Ends the threads of the source, after training."""
