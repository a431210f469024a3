"""Groups of traces as trees: a prefix that is stored once, and the branches that continue it; and
packed trees.

The prefix has the common first tokens of the group, up to the first one in the loss of any trace,
but without the last of them. Every branch starts with a copy of that token, from which its first
own token is predicted. So each position has one target. The last token of a trace is a target only,
so an answer of n tokens is a branch of n tokens.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxlc.config.schema import PosttrainConfig
from jaxlc.core.errors import UserError
from jaxlc.data.sequences.loader import padding
from jaxlc.data.sequences.packing import best_fit, epoch_order
from jaxlc.posttrain.records import Trace

_EPSILON = 1e-4  # added to the standard deviation of rewards, as in TRL


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Traces that share their first tokens; num_prefix_tokens is 0 if they share none."""

    traces: tuple[Trace, ...]
    num_prefix_tokens: int

    @property
    def experts_differ(self) -> list[np.ndarray]:
        """Which tokens of the prefix have other experts in an answer than in the first answer, whose
        experts the prefix gets; bool [prefix tokens] of each other answer.
        """
        first, *others = (trace.experts[: self.num_prefix_tokens] for trace in self.traces)
        return [(experts != first).any((1, 2)) for experts in others]

    @property
    def num_tokens(self) -> int:
        num_prefix_tokens = self.num_prefix_tokens
        branches = (len(trace.tokens) - 1 - num_prefix_tokens for trace in self.traces)
        return num_prefix_tokens + sum(branches)


def groups_of(traces: Iterable[Trace]) -> Iterator[list[Trace]]:
    """Yields the traces of each group: of equal `group`, or neighbors with equal prompts.

    Raises:
      UserError: traces of equal `group` have different prompts.
    """
    groups: dict[object, list[Trace]] = {}
    previous: list[Trace] = []
    for number, trace in enumerate(traces):
        if trace.group is not None:
            previous = groups.setdefault(trace.group, [])
            if previous and previous[0].prompt != trace.prompt and previous[0].where != trace.where:
                raise UserError(
                    f"{previous[0].where} and {trace.where} have group {trace.group!r} and different prompts: a group"
                    " has the answers to one prompt; use other groups in each file"
                )
        elif not previous or previous[-1].group is not None or previous[-1].prompt != trace.prompt:
            previous = groups.setdefault(number, [])
        previous.append(trace)
    yield from groups.values()


def trees_of(group: Sequence[Trace], seq_len: int, *, shares: bool) -> Iterator[Tree]:
    """Yields the trees of a group, of at most `seq_len` tokens each: several, if they do not fit
    into one.

    Args:
      shares: False: each trace is a tree of its own.
    """
    num_prefix_tokens = _num_common_tokens(group) - 1 if shares and len(group) > 1 else 0
    if num_prefix_tokens < 1:
        yield from (Tree(traces=(trace,), num_prefix_tokens=0) for trace in group)
        return
    tree = Tree(traces=(), num_prefix_tokens=num_prefix_tokens)
    for trace in group:
        larger = dataclasses.replace(tree, traces=(*tree.traces, trace))
        if tree.traces and larger.num_tokens > seq_len:
            yield tree
            larger = dataclasses.replace(tree, traces=(trace,))
        tree = larger
    yield tree


def _num_common_tokens(group: Sequence[Trace]) -> int:
    """Number of equal first tokens, none of which is in the loss; fewer than the tokens of any
    trace.
    """
    num_common = min(trace.num_prompt_tokens for trace in group)
    tokens = np.stack([trace.tokens[:num_common] for trace in group])
    differs = (tokens != tokens[0]).any(0)
    return int(differs.argmax()) if differs.any() else num_common


class PackedTraces:
    """An endless dataset as `PackedSequences`, of packed trees; a tree is whole in its sequence."""

    def __init__(
        self,
        trees: Sequence[Tree],
        seq_len: int,
        dtypes: Mapping[str, np.dtype],
        *,
        masks_truncated: bool = False,
        seed: int | None = None,
    ):
        """
        Args:
          trees: none is longer than a sequence. With posttrain.loss, all traces have an advantage.
          dtypes: of the arrays of a sequence, see `array_dtypes`.
          masks_truncated: truncated traces have no loss.
          seed: of the order; None: the same order in every epoch.
        """
        self._seq_len, self._dtypes = seq_len, dtypes
        self._masks_truncated, self._seed = masks_truncated, seed
        self.trees = tuple(trees)
        self.traces = tuple(trace for tree in trees for trace in tree.traces)
        self.num_traces = len(self.traces)
        self.num_tokens = sum(tree.num_tokens for tree in trees)
        bins = best_fit(np.array([tree.num_tokens for tree in trees], np.int64), seq_len)
        self.num_sequences = int(bins.max(initial=-1)) + 1
        self._trees: list[list[Tree]] = [[] for _ in range(self.num_sequences)]
        for tree, number in zip(trees, bins.tolist()):
            self._trees[number].append(tree)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns sequence i in natural order, arrays [S] that `dtypes` names; see `loader.Batch`."""
        epoch, index = divmod(i, self.num_sequences)
        sequence = epoch_order(self.num_sequences, self._seed, epoch)[index]
        arrays = padding(self._seq_len, self._dtypes)
        at = segment = 0
        for tree in self._trees[sequence]:
            prefix_id = 0
            if tree.num_prefix_tokens:
                prefix_id = segment = segment + 1
                tokens = tree.traces[0].tokens[: tree.num_prefix_tokens]
                positions = np.arange(len(tokens))
                values = dict(segment_ids=segment, positions=positions)
                experts = tree.traces[0].experts[: len(tokens)]
                at = _write(arrays, at, tokens=tokens, experts=experts, **values)
            for trace in tree.traces:
                segment += 1
                values = self._branch(trace, tree.num_prefix_tokens)
                begin, at = at, _write(arrays, at, segment_ids=segment, **values)
                if prefix_id:
                    arrays["prefix_ids"][begin:at, 0] = prefix_id
        return arrays

    def _branch(self, trace: Trace, first: int) -> dict[str, np.ndarray | float]:
        """The arrays of the tokens of a trace from `first` on, but its last."""
        inputs, targets = slice(first, len(trace.tokens) - 1), slice(first + 1, None)
        in_loss = trace.in_loss[targets]
        return dict(
            tokens=trace.tokens[inputs],
            targets=trace.tokens[targets],
            positions=np.arange(first, len(trace.tokens) - 1),
            loss_weights=in_loss & (not (self._masks_truncated and trace.is_truncated)),
            answer_weights=in_loss / in_loss.sum(),
            advantages=trace.advantage or 0.0,
            experts=trace.experts[inputs],
            **dict(sampled_log_probs=np.nan)
            | {name: x[targets] for name, x in trace.log_probs.items()},
        )


def _write(
    arrays: dict[str, np.ndarray], at: int, tokens: np.ndarray, **values: np.ndarray | int | float
) -> int:
    """Writes the values of a document from `at` on, without those that the batch does not have;
    returns its end.
    """
    end = at + len(tokens)
    for name, value in dict(tokens=tokens, **values).items():
        if name in arrays:
            arrays[name][at:end] = value
    return end


def with_advantages(group: Sequence[Trace], posttrain: PosttrainConfig) -> list[Trace]:
    """The traces with their advantage: as recorded, or the reward minus the mean reward of the
    group.

    With `scale_advantages` it is divided by the standard deviation of the group, with n - 1 in the
    denominator.

    Raises:
      UserError: a trace has neither a reward nor an advantage.
    """
    for trace in group:
        if trace.advantage is None and trace.reward is None:
            raise UserError(
                f"{trace.where}: neither reward nor advantage, which config.posttrain.loss={posttrain.loss!r} needs"
            )
    if all(trace.advantage is not None for trace in group):
        return list(group)
    if any(trace.reward is None for trace in group):
        raise UserError(
            f"{group[0].where}: some traces of its group have a reward, and others an advantage; use one"
        )
    rewards = np.array([trace.reward for trace in group])
    # 0 in spite of rounding
    centered = rewards - rewards.mean() if np.ptp(rewards) else np.zeros(len(rewards))
    if posttrain.scale_advantages and len(group) > 1:
        centered = centered / (rewards.std(ddof=1) + _EPSILON)
    return [dataclasses.replace(trace, advantage=x) for trace, x in zip(group, centered.tolist())]


def fingerprint(
    traces: Sequence[Trace], settings: Sequence[object], dtypes: Mapping[str, np.dtype]
) -> str:
    """Equal for two datasets if all their sequences are equal.

    Args:
      settings: what the sequences depend on, besides the traces.
    """
    digest = hashlib.sha256()
    digest.update(repr((tuple(settings), list(dtypes))).encode())
    for trace in traces:
        fields = (
            trace.group,
            trace.reward,
            trace.advantage,
            trace.is_truncated,
            sorted(trace.log_probs),
        )
        digest.update(repr(fields).encode())
        for array in (
            trace.tokens,
            trace.in_loss,
            *(trace.log_probs[name] for name in sorted(trace.log_probs)),
            trace.experts,
        ):
            digest.update(array.tobytes())
    return digest.hexdigest()
