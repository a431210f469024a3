"""Groups of traces as trees: runs of tokens that are stored once, and the branches that continue
them; and packed trees.

A node of a tree is a document: inputs, each of which predicts the next token of its traces. So a
run of n equal tokens is a node of n - 1: its last token has other targets in each branch, and each
branch starts with a copy of it. The last token of a trace is a target only.

Trees of one level share tokens of prompts only, and the arrays of the loss belong to tokens. Deeper
trees share all equal first tokens, so a token may be in the loss of several traces. Their arrays of
the loss have one entry, or row, for each trace and token of it in the loss. So recorded values and
what is in the loss may differ between traces that share a token. A sequence has as many rows as
tokens times levels: enough for a tree of branches of equal lengths, whose root is a prompt.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jaxlc.config.schema import PosttrainConfig
from jaxlc.core import UserError
from jaxlc.core.files import Arrays
from jaxlc.data.sequences.loader import padding
from jaxlc.data.sequences.packing import best_fit, epoch_order
from jaxlc.posttrain.records import EXPERTS, LOG_PROBS, TEACHER, Trace

_EPSILON = 1e-4  # added to the standard deviation of rewards, as in TRL


@dataclass(kw_only=True, eq=False)
class Tree:
    """A node with the nodes that continue it.

    Its traces have the same inputs `first` to `end`; some may end before. Traces that end in a node,
    or have the same tokens, have no node of their own.
    """

    traces: list[Trace]
    first: int
    end: int
    children: list["Tree"] = field(default_factory=list)
    repeats: bool = False  # another tree has its first tokens, too, since both do not fit into one

    @property
    def trace(self) -> Trace:
        """The first trace with all inputs of the node, whose recorded experts the node has."""
        return next(trace for trace in self.traces if len(trace.tokens) > self.end)

    def nodes(self) -> Iterator[tuple[int, "Tree"]]:
        """The nodes in the order of the layout, depth-first, each after the number of its ancestors."""
        stack = [(0, self)]
        while stack:
            depth, node = stack.pop()
            yield depth, node
            stack += [(depth + 1, child) for child in reversed(node.children)]

    def inputs(self, trace: Trace) -> np.ndarray:
        """The inputs of the node that a trace has, int [inputs]."""
        return np.arange(self.first, min(self.end, len(trace.tokens) - 1))

    @property
    def num_tokens(self) -> int:
        return sum(node.end - node.first for _, node in self.nodes())

    def size(self, levels: int) -> int:
        """Places of a sequence that it needs: for its tokens, and for the rows of its loss, of which
        a place has `levels`.
        """
        num_rows = sum(int(trace.in_loss.sum()) for trace in self.traces)
        return max(self.num_tokens, -(-num_rows // max(1, levels)))


def experts_differ(trees: Iterable[Tree]) -> float:
    """The fraction of shared tokens that have other recorded experts in a trace than in the trace
    whose experts their node has.
    """
    num_tokens = num_differ = 0
    for _, node in (item for tree in trees for item in tree.nodes()):
        for trace in node.traces:
            if trace is not node.trace:
                inputs = node.inputs(trace)
                ours, theirs = (x.recorded[EXPERTS][inputs] for x in (trace, node.trace))
                num_tokens += len(inputs)
                num_differ += (ours != theirs).any((1, 2)).sum()
    return float(num_differ / max(1, num_tokens))


def groups_of(traces: Iterable[Trace]) -> Iterator[list[Trace]]:
    """Yields the traces of each group: of equal `group`, or neighbors with equal prompts.

    Raises:
      UserError: traces of equal `group` have different prompts, and no trajectory.
    """
    groups: dict[object, list[Trace]] = {}
    previous: list[Trace] = []
    for number, trace in enumerate(traces):
        if trace.group is not None:
            previous = groups.setdefault(trace.group, [])
            others = [x for x in (*previous, trace) if x.trajectory is None] or [trace]
            if others[0].prompt != others[-1].prompt and others[0].where != trace.where:
                raise UserError(
                    f"{others[0].where} and {trace.where} have group {trace.group!r} and different prompts: a group has"
                    " the answers to one prompt; use other groups in each file, or the field trajectory"
                )
        elif not previous or previous[-1].group is not None or previous[-1].prompt != trace.prompt:
            previous = groups.setdefault(number, [])
        previous.append(trace)
    yield from groups.values()


def trees_of(group: Sequence[Trace], seq_len: int, *, levels: int) -> list[Tree]:
    """The trees of a group that fit into `seq_len` places: several, if traces share no tokens, or
    do not fit into one.

    Args:
      levels: the most ancestors of a node; 0: each trace is a tree of its own.
    """
    found: list[Tree] = []
    for tree in _all_trees(group, levels):
        if tree.size(levels) <= seq_len:
            found.append(tree)
            continue
        # traces that share many tokens are neighbors
        order = {id(trace): i for i, (_, node) in enumerate(tree.nodes()) for trace in node.traces}
        parts: list[list[Trace]] = [[]]
        for trace in sorted(tree.traces, key=lambda trace: order[id(trace)]):
            larger = _all_trees([*parts[-1], trace], levels)
            if parts[-1] and any(x.size(levels) > seq_len for x in larger):
                parts.append([])
            parts[-1].append(trace)
        for number, part in enumerate(parts):
            smaller = _all_trees(part, levels)
            found += [replace(x, repeats=number > 0) for x in smaller]
    return found


def _all_trees(traces: Sequence[Trace], levels: int) -> list[Tree]:
    """The trees of all equal first tokens that may be shared.

    While a path has too many shared nodes, the one that saves the fewest tokens becomes the start of
    each of its children.
    """
    root = Tree(traces=[], first=0, end=0)
    for trace in traces:
        _insert(root.children, trace, levels)
    while True:
        longest: list[Tree] = []
        path: list[Tree] = []
        for depth, node in root.nodes():
            path = [*path[:depth], node]
            longest = max(longest, path, key=len)
        if len(longest) <= levels + 2:
            return root.children
        parent, node = min(
            zip(longest, longest[1:-1]),
            key=lambda pair: (pair[1].end - pair[1].first) * (len(pair[1].children) - 1),
        )
        for child in node.children:
            child.first = node.first
        node.children[0].traces += [x for x in node.traces if len(x.tokens) - 1 <= node.end]
        at = parent.children.index(node)
        parent.children[at : at + 1] = node.children


def _num_shareable(trace: Trace, levels: int) -> int:
    """The number of first tokens that other traces may share."""
    return len(trace.tokens) if levels > 1 else levels * trace.num_prompt_tokens


def _insert(siblings: list[Tree], trace: Trace, levels: int) -> None:
    """Adds a trace to trees, with a node for the inputs that it does not share."""
    at = 0
    end = len(trace.tokens) - 1
    most = _num_shareable(trace, levels)
    while at < end:
        for node in siblings if at + 1 < most else ():
            last = min(node.end + 1, most, _num_shareable(node.trace, levels))
            span = slice(node.first, last)
            num_shared = num_equal(node.trace.tokens[span], trace.tokens[span])
            if num_shared > 1:  # an input is shared if it predicts equal tokens
                break
        else:
            siblings.append(Tree(traces=[trace], first=at, end=end))
            return
        at += num_shared - 1
        if at < min(node.end, end):
            others = [other for other in node.traces if len(other.tokens) - 1 > at]
            rest = Tree(traces=others, first=at, end=node.end, children=node.children)
            node.end = at
            node.children = [rest]
        node.traces.append(trace)
        if at == node.end and not node.children:
            node.end = end
            return
        siblings = node.children


def num_equal(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Number of equal first tokens."""
    num_tokens = min(len(ours), len(theirs))
    is_equal = ours[:num_tokens] == theirs[:num_tokens]
    return int(np.append(is_equal, False).argmin())


def sequences_of(
    trees: Sequence[Tree], seq_len: int, levels: int, multiple: int = 1
) -> list[list[Tree]]:
    """The trees of each sequence, by best fit; the number of sequences is a multiple of `multiple`."""
    bins = best_fit(np.array([tree.size(levels) for tree in trees], np.int64), seq_len)
    num_sequences = int(bins.max(initial=-1)) + 1
    found: list[list[Tree]] = [[] for _ in range(num_sequences + -num_sequences % multiple)]
    for tree, number in zip(trees, bins.tolist()):
        found[number].append(tree)
    return found


def labeled_steps(
    traces: Sequence[Trace], seq_len: int, batch_size: int, *, levels: int
) -> list[list[Tree]]:
    """The trees of each sequence of kto: every step has as many of the next traces as fit.

    A step also has mismatched answers, as TRL: of n traces, each prompt continues with the answer of
    the trace before, and the first one with the last answer. An answer that does not fit is cut.

    Args:
      batch_size: sequences of a step.
    Raises:
      UserError: fewer than two traces fit into a step.
    """
    ends = np.cumsum([trace.in_loss.sum() for trace in traces])
    found = list[list[Tree]]()
    begin = 0

    def step_of(count: int) -> list[list[Tree]]:
        part = traces[begin : begin + count]
        pairs: list[Trace] = []
        for trace, other in zip(part, (part[-1], *part[:-1])):
            first = trace.num_prompt_tokens
            first_other = other.num_prompt_tokens
            tokens = np.concatenate([trace.tokens[:first], other.tokens[first_other:]])
            in_loss = np.concatenate([trace.in_loss[:first], other.in_loss[first_other:]])
            values = dict(where="", advantage=None, recorded={}, has_loss=False)
            mismatched = replace(trace, tokens=tokens, in_loss=in_loss, **values)
            fits = len(tokens) <= seq_len + 1
            pairs += [trace, mismatched if fits else mismatched.cut(seq_len + 1)]
        groups = groups_of(pairs)
        step_trees = [x for group in groups for x in trees_of(group, seq_len, levels=levels)]
        return sequences_of(step_trees, seq_len, levels, batch_size)

    while begin < len(traces):
        num_left = len(traces) - begin
        most = np.searchsorted(ends, ends[begin] + batch_size * seq_len) - begin
        counts = range(1, min(most, num_left) + 1)
        count = bisect_right(counts, batch_size, key=lambda count: len(step_of(count)))
        count -= num_left - count == 1  # the last step has no mismatched answer of its own
        while count > 1 and len(step_of(count)) > batch_size:  # best fit may need more for fewer
            count -= 1
        if count < 2:
            raise UserError(
                f"{traces[begin].where}: config.posttrain.loss='kto' needs two answers in a step, each with its prompt"
                " and another answer; increase config.train.global_batch_size or config.data.seq_len"
            )
        found += step_of(count)
        begin += count
    return found


class PackedTraces:
    """An endless dataset as `PackedSequences`, of packed trees; a tree is whole in its sequence."""

    def __init__(
        self,
        trees: Sequence[Tree],
        seq_len: int,
        dtypes: Mapping[str, np.dtype],
        *,
        shared_tokens: Literal["leaf", "node"] = "leaf",
        seed: int | None = None,
        sequences: Sequence[list[Tree]] | None = None,
    ):
        """
        Args:
          trees: none is larger than a sequence. With posttrain.loss, all traces have an advantage.
          dtypes: of the arrays of a sequence, see `array_dtypes`.
          shared_tokens: config.data.shared_tokens.
          seed: of the order; None: the same order in every epoch.
          sequences: the trees of each, in the order of training; None: by best fit, in any order.
        """
        self._seq_len = seq_len
        self._dtypes = dtypes
        self._seed = seed
        self._counts_once = shared_tokens == "node"
        self.trees = tuple(trees)
        self.traces = tuple(trace for tree in trees for trace in tree.traces if trace.where)
        self.num_tokens = sum(tree.num_tokens for tree in trees)
        (levels,) = dtypes["prefix_ids"].shape if "prefix_ids" in dtypes else (0,)
        self._is_ordered = sequences is not None
        self._sequences = sequences or sequences_of(trees, seq_len, levels)
        self.num_sequences = len(self._sequences)

    def __getitem__(self, i: int) -> Arrays:
        """Returns sequence i in natural order, arrays [S, ...] that `dtypes` names; see `loader.Batch`."""
        epoch, sequence = divmod(i, self.num_sequences)
        if not self._is_ordered:
            sequence = epoch_order(self.num_sequences, self._seed, epoch)[sequence]
        arrays = padding(self._seq_len, self._dtypes)
        rows = {name: array.reshape(-1) for name, array in arrays.items()}
        at = row = 0
        segments: list[int] = []  # of a node and its ancestors
        leaves: dict[int, int] = {}
        for segment, (depth, node) in enumerate(
            (item for tree in self._sequences[sequence] for item in tree.nodes()), start=1
        ):
            span = slice(node.first, node.end)
            targets = slice(node.first + 1, node.end + 1)
            segments = [*segments[:depth], segment]
            end = at + node.end - node.first
            values = dict(
                tokens=node.trace.tokens[span],
                targets=node.trace.tokens[targets],
                positions=np.arange(node.first, node.end),
                segment_ids=segment,
                **_recorded_at(node.trace, span, (EXPERTS,)),
            )
            if depth:
                arrays["prefix_ids"][at:end, :depth] = segments[:-1]
            for trace in node.traces:
                inputs = node.inputs(trace)
                inputs = inputs[trace.in_loss[inputs + 1]]
                places = at + inputs - node.first
                _write(arrays, places, **_recorded_at(trace, inputs + 1, TEACHER))
                loss = self._loss(trace, inputs + 1)
                if "loss_tokens" in arrays:
                    leaf = leaves.setdefault(id(trace), len(leaves) + 1)
                    loss |= dict(loss_tokens=places, loss_segments=leaf)
                    places = slice(row, row + len(inputs))
                    row = places.stop
                _write(rows, places, **loss)
            _write(arrays, slice(at, end), **values)
            at = end
        if self._counts_once:
            tokens = rows["loss_tokens"][:row]
            weights = rows["loss_weights"][:row]
            num_traces = np.bincount(tokens, weights > 0)
            weights /= np.maximum(num_traces, 1)[tokens]
        return arrays

    def _loss(self, trace: Trace, targets: np.ndarray) -> dict[str, Any]:
        """The arrays of the loss of some targets of a trace that are in its loss."""
        return dict(
            loss_weights=trace.has_loss,
            answer_weights=1 / trace.in_loss.sum(),
            advantages=trace.advantage or 0.0,
            **dict(sampled_log_probs=np.nan) | _recorded_at(trace, targets, LOG_PROBS),
        )


def _recorded_at(trace: Trace, places: slice | np.ndarray, names: Iterable[str]) -> Arrays:
    """The values at some tokens of the recorded arrays `names`, without arrays that the trace lacks."""
    return {name: trace.recorded[name][places] for name in names if name in trace.recorded}


def _write(arrays: Arrays, places: slice | np.ndarray, **values: np.ndarray | int | float) -> None:
    """Writes values, without those that the batch does not have."""
    for name in values.keys() & arrays.keys():
        arrays[name][places] = values[name]


def with_advantages(group: Sequence[Trace], posttrain: PosttrainConfig) -> list[Trace]:
    """The traces with their advantage: as recorded, or the reward minus the mean reward of the
    group.

    With `scale_advantages` it is divided by the standard deviation of the group, with n - 1 in the
    denominator. Both count a trajectory once; its traces share reward and advantage.

    Raises:
      UserError: a trace has neither a reward nor an advantage, or a trajectory has two of them.
    """
    trajectories = trajectories_of(group)
    rewards = [_recorded(traces, "reward") for traces in trajectories]
    advantages = [_recorded(traces, "advantage") for traces in trajectories]
    for traces, *values in zip(trajectories, rewards, advantages):
        if values == [None, None]:
            raise UserError(
                f"{traces[0].where}: neither reward nor advantage, which config.posttrain.loss={posttrain.loss!r} needs"
            )
    if None in advantages:
        if None in rewards:
            raise UserError(
                f"{group[0].where}: some traces of its group have a reward, and others an advantage; use one"
            )
        numbers = np.array(rewards)
        # 0 in spite of rounding
        centered = numbers - numbers.mean() if np.ptp(numbers) else np.zeros(len(numbers))
        if posttrain.scale_advantages and len(numbers) > 1:
            centered = centered / (numbers.std(ddof=1) + _EPSILON)
        advantages = centered.tolist()
    values_of = {
        id(trace): dict(reward=reward, advantage=advantage)
        for traces, reward, advantage in zip(trajectories, rewards, advantages)
        for trace in traces
    }
    return [replace(trace, **values_of[id(trace)]) for trace in group]


def trajectories_of(group: Sequence[Trace]) -> list[list[Trace]]:
    """The traces of each trajectory; a trace without one is one by itself."""
    found: dict[str | int, list[Trace]] = {}
    for number, trace in enumerate(group):
        key = number if trace.trajectory is None else trace.trajectory
        found.setdefault(key, []).append(trace)
    return list(found.values())


def _recorded(traces: Sequence[Trace], name: str) -> float | None:
    """The reward or advantage of a trajectory, which all or some of its traces have."""
    known = [(getattr(x, name), x) for x in traces if getattr(x, name) is not None]
    if not known:
        return None
    first, other = known[0]
    for value, trace in known:
        if value != first:
            raise UserError(
                f"{trace.where}: {name} {value} of trajectory {trace.trajectory!r}, which has {first} in {other.where};"
                " record it once, or equal ones"
            )
    return first


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
            [name for name in LOG_PROBS if name in trace.recorded],
            *([] if trace.trajectory is None else [trace.trajectory]),
        )
        digest.update(repr(fields).encode())
        for array in (trace.tokens, trace.in_loss, *trace.recorded.values()):
            digest.update(array.tobytes())
    return digest.hexdigest()
