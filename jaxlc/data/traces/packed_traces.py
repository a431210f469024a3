"""Sequences of packed trees of traces, with the arrays that the losses of post-training need."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from jaxlc.config import Config
from jaxlc.config.posttrain_schema import PosttrainConfig
from jaxlc.core.errors import UserError
from jaxlc.data.sequences.loader import array_dtypes
from jaxlc.data.sequences.packing import best_fit, epoch_order
from jaxlc.data.traces.trace_records import Trace
from jaxlc.data.traces.trace_trees import Tree

_EPSILON = 1e-4  # added to the standard deviation of rewards, as in TRL


class PackedTraces:
    """An endless dataset as `PackedSequences`; a tree is whole in its sequence."""

    def __init__(self, trees: Sequence[Tree], config: Config, seed: int | None):
        """
        Args:
          trees: at least one; none is longer than a sequence. With posttrain.loss, all traces have an advantage.
          seed: of the order; None: the same order in every epoch.
        """
        self._config, self._seed = config, seed
        self._dtypes = array_dtypes(config)
        self.trees = tuple(trees)
        self.traces = tuple(trace for tree in trees for trace in tree.traces)
        self.num_traces = len(self.traces)
        self.num_tokens = sum(tree.num_tokens for tree in trees)
        bins = best_fit(np.array([tree.num_tokens for tree in trees], np.int64), config.data.seq_len)
        self.num_sequences = int(bins.max()) + 1
        self._trees: list[list[Tree]] = [[] for _ in range(self.num_sequences)]
        for tree, number in zip(trees, bins.tolist()):
            self._trees[number].append(tree)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns sequence i in natural order, arrays [S] that `array_dtypes` names; see `step.batch.Batch`."""
        epoch, index = divmod(i, self.num_sequences)
        sequence = epoch_order(self.num_sequences, self._seed, epoch)[index]
        arrays = {name: np.zeros(self._config.data.seq_len, dtype) for name, dtype in self._dtypes.items()}
        at = segment = 0
        for tree in self._trees[sequence]:
            prefix_id = 0
            if tree.num_prefix_tokens:
                prefix_id = segment = segment + 1
                tokens = tree.traces[0].tokens[: tree.num_prefix_tokens]
                positions = np.arange(len(tokens))
                at = _write(arrays, at, tokens=tokens, segment_ids=segment, positions=positions)
            for trace in tree.traces:
                segment += 1
                values = self._branch(trace, tree.num_prefix_tokens)
                at = _write(arrays, at, segment_ids=segment, prefix_ids=prefix_id, **values)
        return arrays

    def _branch(self, trace: Trace, first: int) -> dict[str, np.ndarray | float]:
        """The arrays of the tokens of a trace from `first` on, but its last."""
        inputs, targets = slice(first, len(trace.tokens) - 1), slice(first + 1, None)
        in_loss = trace.in_loss[targets]
        posttrain = self._config.posttrain
        is_masked = bool(posttrain.loss) and posttrain.mask_truncated and trace.is_truncated
        return dict(
            tokens=trace.tokens[inputs],
            targets=trace.tokens[targets],
            positions=np.arange(first, len(trace.tokens) - 1),
            loss_weights=in_loss & (not is_masked),
            answer_weights=in_loss / in_loss.sum(),
            advantages=trace.advantage or 0.0,
            **dict(old_log_probs=np.nan) | {name: x[targets] for name, x in trace.log_probs.items()},
        )


def _write(arrays: dict[str, np.ndarray], at: int, tokens: np.ndarray, **values: np.ndarray | int | float) -> int:
    """Writes the values of a document from `at` on, without those that the batch does not have; returns its end."""
    end = at + len(tokens)
    for name, value in dict(tokens=tokens, **values).items():
        if name in arrays:
            arrays[name][at:end] = value
    return end


def with_advantages(group: Sequence[Trace], posttrain: PosttrainConfig) -> list[Trace]:
    """The traces with their advantage: as recorded, or the reward minus the mean reward of the group.

    With `scale_advantages` it is divided by the standard deviation of the group, with n - 1 in the denominator.

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
        raise UserError(f"{group[0].where}: some traces of its group have a reward, and others an advantage; use one")
    rewards = np.array([trace.reward for trace in group])
    centered = rewards - rewards.mean() if np.ptp(rewards) else np.zeros(len(rewards))  # 0 in spite of rounding
    if posttrain.scale_advantages and len(group) > 1:
        centered = centered / (rewards.std(ddof=1) + _EPSILON)
    return [dataclasses.replace(trace, advantage=x) for trace, x in zip(group, centered.tolist())]


def fingerprint(traces: Sequence[Trace], config: Config) -> str:
    """Equal for two datasets if all their sequences are equal."""
    digest = hashlib.sha256()
    data, posttrain = config.data, config.posttrain
    settings = data.seq_len, data.seed, data.eval_fraction, posttrain.scale_advantages, posttrain.mask_truncated
    digest.update(repr((settings, list(array_dtypes(config)))).encode())
    for trace in traces:
        fields = trace.group, trace.reward, trace.advantage, trace.is_truncated, sorted(trace.log_probs)
        digest.update(repr(fields).encode())
        for array in (trace.tokens, trace.in_loss, *(trace.log_probs[name] for name in sorted(trace.log_probs))):
            digest.update(array.tobytes())
    return digest.hexdigest()
