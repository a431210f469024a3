"""The contract of a data source: what a run trains on and is evaluated on, and what `jaxlc data` shows of it. Feeds its
sequences to the devices of all processes as sharded arrays.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import grain
import jax
import numpy as np

from jaxlc.config import Config, ModelConfig
from jaxlc.core import Log, Update, UserError, count_text, no_progress
from jaxlc.core.files import Arrays
from jaxlc.data.tokens.tokenizers import Tokenizer

# a larger fraction of the data without a loss is worth a warning, and one of invalid text an error
MANY = 0.1

Batches = Iterable[Mapping]  # each maps "tokens" and optional names to arrays [sequences, tokens]


class Sequences(Protocol):
    def __getitem__(self, i: int) -> Arrays:
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
    log: Log = lambda line: None


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

    # Whether replicas get packed documents with equal work: the order in a step is not the source's.
    is_balanced: ClassVar[bool] = False
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


class Batch(NamedTuple):
    """Arrays [gradient accumulation steps, sequences, tokens], tokens in layout order."""

    tokens: jax.Array  # int32
    targets: jax.Array  # int32: the next token of the same document
    loss_weights: jax.Array  # float32: 0 at a document's last token and on padding
    # int32: number of earlier tokens of the same document in the sequence, and of its prefix
    positions: jax.Array
    segment_ids: jax.Array  # int32: 0 is padding
    # The next are None unless the config needs them: `array_dtypes`. Each has the values of the
    # token's document or target. int32 [.., levels of attention.shared_prefixes]: the segment ids of
    # the prefixes that the document continues, the root first; 0 from its own level on
    prefix_ids: jax.Array | None = None
    # float32; of pairs: 1 for the chosen answer, -1 for the rejected one
    advantages: jax.Array | None = None
    # float32: 1 / number of targets of the answer; 0 outside of answers
    answer_weights: jax.Array | None = None
    old_log_probs: jax.Array | None = None  # float32; of the trainer, before its first update
    # float32; of the sampler. NaN: unknown, if the loss does not use them
    sampled_log_probs: jax.Array | None = None
    reference_log_probs: jax.Array | None = None  # float32
    # [.., layers with experts, experts per token] of posttrain.replay_routing: the recorded experts
    # of each token, uint8, or uint16 from 256 experts on. The largest value: there is no record,
    # and the router chooses.
    experts: jax.Array | None = None
    # [.., posttrain.teacher_top_k] of tokens, also with loss_tokens: the teacher's most probable next
    # tokens, int32, -1: none; and their log-probabilities, float32
    teacher_tokens: jax.Array | None = None
    teacher_log_probs: jax.Array | None = None
    # The next two: with more than one level of prefixes, loss_weights, answer_weights, advantages and
    # log-probabilities are [.., levels]. Their entries are not those of tokens, but rows of the loss in
    # any order, one for each answer and token of it in the loss. int32: the place of the token in the
    # sequence
    loss_tokens: jax.Array | None = None
    loss_segments: jax.Array | None = None  # int32: the answer, from 1 on; 0 is padding
    # int32, of the order of tokens, not of the data: `SequenceOrder.chained`;
    # `Assignment.fragments`
    fragment_ids: jax.Array | None = None


ALWAYS = dict(
    tokens=np.dtype("i4"),
    targets=np.dtype("i4"),
    loss_weights=np.dtype("f4"),
    positions=np.dtype("i4"),
    segment_ids=np.dtype("i4"),
)


def experts_dtype(model: ModelConfig) -> np.dtype:
    """The dtype of the recorded experts of a token, with the shape [layers with experts, experts
    per token].
    """
    dtype = np.uint8 if model.experts.num_experts < 256 else np.uint16
    return np.dtype((dtype, (len(model.layers_with_experts), model.experts.experts_per_token)))


def array_dtypes(config: Config) -> dict[str, np.dtype]:
    """The dtype of each array of a batch of `config`; with a shape, if tokens have arrays."""
    posttrain = config.posttrain
    names = ["loss_weights"]
    if posttrain.loss:
        names += ["advantages", "answer_weights"]
    if posttrain.old_log_probs == "record":
        names.append("old_log_probs")
    if posttrain.uses_sampled or config.rollouts.source:
        # otherwise for metrics only; NaN where a record has none
        names.append("sampled_log_probs")
    if posttrain.reads_reference:
        names.append("reference_log_probs")
    num_levels = config.attention.shared_prefixes
    rows = (num_levels,) if num_levels > 1 else ()
    dtypes = dict.fromkeys(names, np.dtype(("f4", rows)))
    if num_levels:
        dtypes = dict(prefix_ids=np.dtype(("i4", (num_levels,)))) | dtypes
    if rows:
        dtypes |= dict.fromkeys(("loss_tokens", "loss_segments"), np.dtype(("i4", rows)))
    if posttrain.replay_routing:
        dtypes["experts"] = experts_dtype(config.model)
    if top_k := posttrain.teacher_top_k:
        dtypes["teacher_tokens"] = np.dtype(("i4", (top_k,)))
        dtypes["teacher_log_probs"] = np.dtype(("f4", (top_k,)))
    return ALWAYS | dtypes


def padding(num_tokens: int, dtypes: Mapping[str, np.dtype]) -> Arrays:
    """The arrays of a sequence without text: zeros, no recorded experts and no teacher."""
    arrays = {name: np.zeros(num_tokens, dtype) for name, dtype in dtypes.items()}
    if "experts" in arrays:
        arrays["experts"][:] = np.iinfo(arrays["experts"].dtype).max
    if "teacher_tokens" in arrays:
        arrays["teacher_tokens"][:] = -1
    return arrays


_ENDLESS = 2**62
# building a sequence is mostly copying; a few threads saturate the memory bandwidth
MAX_THREADS = 8


# The order of a sequence's tokens in the arrays of a batch: arrays [S] in natural order -> int [S], whose index t has
# the token at place t. A pure function, since processes that share a sequence call it independently; also in threads.
OrderOf = Callable[[Mapping[str, np.ndarray]], np.ndarray]


def batches(
    arranged: Callable[[int], tuple[Mapping[str, np.ndarray], np.ndarray]],
    *,
    first_sequence: int,
    global_batch_size: int,
    gradient_accumulation_steps: int,
    seq_len: int,
    sharding: jax.sharding.NamedSharding,
    prefetch_steps: int,
) -> Iterator[dict[str, jax.Array]]:
    """Yields endless batches of global arrays [A, B, S]: A microbatches of B sequences of S=seq_len
    tokens each.

    Sequence b of microbatch a of step n is `arranged(first_sequence + n * global_batch_size + a *
    B + b)`: (arrays, order). The arrays of the batch are in natural order; position t of the layout
    holds token `order[t]`. `arranged` is called from several threads. `sharding` shards B and S,
    e.g. over fsdp and context. A process builds only the sequences of which its devices hold a
    shard, in threads, `prefetch_steps` steps ahead; another thread copies the next batch to the
    devices (0: all on demand). Dropping the iterator ends the threads.
    """
    num_B, remainder = divmod(global_batch_size, gradient_accumulation_steps)
    assert not remainder, (global_batch_size, gradient_accumulation_steps)
    shape = (gradient_accumulation_steps, num_B, seq_len)
    local_B, spans_T = local_part(sharding.addressable_devices_indices_map(shape).values(), shape)
    local_sequences = [(a, b) for a in range(gradient_accumulation_steps) for b in local_B]

    def local_spans(i: int) -> dict[str, list[np.ndarray]]:
        """The spans of the i-th sequence that this process builds, in layout order."""
        step = i // len(local_sequences)
        a, b = local_sequences[i % len(local_sequences)]
        index = first_sequence + step * global_batch_size + a * shape[1] + b
        return spans_of(*arranged(index), spans_T)

    def global_array(
        name: str, step: dict[tuple[int, int], dict[str, list[np.ndarray]]]
    ) -> jax.Array:
        def shard(index: tuple[slice, slice, slice]) -> np.ndarray:
            range_A, range_B = (range(*index[dim].indices(shape[dim])) for dim in (0, 1))
            span = spans_T.index(index[2].indices(shape[2])[:2])
            return np.stack([np.stack([step[a, b][name][span] for b in range_B]) for a in range_A])

        entry_shape = step[local_sequences[0]][name][0].shape[1:]
        return jax.make_array_from_callback((*shape, *entry_shape), sharding, shard)

    num_prefetched = prefetch_steps * len(local_sequences)
    options = grain.ReadOptions(
        num_threads=min(MAX_THREADS, num_prefetched), prefetch_buffer_size=num_prefetched
    )
    built = iter(grain.MapDataset.range(_ENDLESS).map(local_spans).to_iter_dataset(options))

    def place_next_batch() -> dict[str, jax.Array]:
        try:
            step = {at: next(built) for at in local_sequences}
        except (
            UserError
        ) as error:  # without the frames and notes of the threads that build sequences
            raise UserError(str(error)) from None
        return {name: global_array(name, step) for name in step[local_sequences[0]]}

    with contextlib.closing(built):  # also when this generator is closed or dropped
        if not prefetch_steps:
            while True:
                yield place_next_batch()
        with ThreadPoolExecutor(1, thread_name_prefix="place_batch") as thread:
            following = thread.submit(place_next_batch)
            while True:
                current = following.result()
                following = thread.submit(place_next_batch)
                yield current


def local_part(
    indices: Iterable[tuple[slice, ...]], shape: tuple[int, int, int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Which sequences of a microbatch a process builds, and which spans (begin, end) of each it
    keeps, layout order.

    Args:
      indices: of its devices in a batch of `shape` [A, B, S].
    """
    local_indices = list(indices)
    local_B = sorted(
        {b for _, slice_B, _ in local_indices for b in range(*slice_B.indices(shape[1]))}
    )
    return local_B, sorted({slice_T.indices(shape[2])[:2] for _, _, slice_T in local_indices})


def spans_of(
    sequence: Mapping[str, np.ndarray], order_T: np.ndarray, spans_T: list[tuple[int, int]]
) -> dict[str, list[np.ndarray]]:
    """The spans (begin, end) of each array, in layout order."""
    return {
        name: [array[order_T[begin:end]] for begin, end in spans_T]
        for name, array in sequence.items()
    }
