"""Held-out loss, also by position: as a function of the number of earlier tokens of the same document."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.core.axes import DATA, FSDP
from jaxlc.data.loader import batches
from jaxlc.data.packing import PackedSequences
from jaxlc.train.batch import BATCH_SPEC, Batch
from jaxlc.train.step import TrainStep


class PositionSums(NamedTuple):
    """float32 [number of bins] each; bin b holds tokens with edges[b] <= position < edges[b + 1]."""

    weight: jax.Array
    loss: jax.Array  # sum of weight x loss, in nats
    loss_squared: jax.Array  # sum of weight x loss^2, for error bars


class Evaluation(NamedTuple):
    loss: float  # mean over all held-out target tokens, nats
    edges: np.ndarray  # int64 [number of bins + 1]: numbers of earlier tokens of the same document
    sums: PositionSums  # numpy


def position_edges(num_tokens: int) -> np.ndarray:
    """Edges of bins of half an octave: 0, 1, 2, 3, 4, 6, 8, 12, 16, ... up to the sequence length."""
    octaves = 2.0 ** np.arange(0, np.log2(max(2, num_tokens)) + 0.5, 0.5)
    edges = np.unique(np.concatenate([[0], np.round(octaves).astype(np.int64)]))
    return np.append(edges[edges < num_tokens], num_tokens)


class Evaluator:
    """Evaluates parameters on the first held-out sequences, the same in every evaluation."""

    def __init__(self, step: TrainStep, heldout: PackedSequences, num_sequences: int, order: np.ndarray):
        self._mesh, self._order = step.mesh, order
        self.num_sequences = min(num_sequences, heldout.num_sequences)
        self._sequences = _FirstSequences(heldout, self.num_sequences)
        self.edges = position_edges(step.config.data.seq_len)
        replicated = NamedSharding(self._mesh, PartitionSpec())
        self._sums = jax.jit(functools.partial(_position_sums, step, self.edges), out_shardings=replicated)

    def __call__(self, params) -> Evaluation:
        batch_size = self._mesh.shape[DATA] * self._mesh.shape[FSDP]
        num_batches = -(-self.num_sequences // batch_size)
        stream = batches(
            self._sequences,
            first_sequence=0,
            global_batch_size=batch_size,
            gradient_accumulation_steps=1,
            sequence_order=self._order,
            sharding=NamedSharding(self._mesh, BATCH_SPEC),
            prefetch_steps=1,
        )
        total = PositionSums(*np.zeros((3, len(self.edges) - 1)))
        for _, arrays in zip(range(num_batches), stream):
            sums = self._sums(params, jax.tree.map(lambda x: x[0], Batch(**arrays)))
            total = jax.tree.map(lambda a, b: a + np.asarray(b, np.float64), total, sums)
        return Evaluation(float(total.loss.sum() / total.weight.sum()), self.edges, total)


class _FirstSequences:
    """The first sequences of a corpus; then the same again with weight 0, to fill the last batch."""

    def __init__(self, sequences: PackedSequences, num_sequences: int):
        self._sequences, self._num_sequences = sequences, num_sequences

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        sequence = self._sequences[i % self._num_sequences]
        if i < self._num_sequences:
            return sequence
        return {**sequence, "loss_weights": np.zeros_like(sequence["loss_weights"])}


def _position_sums(step: TrainStep, edges: np.ndarray, params, batch: Batch) -> PositionSums:
    losses_BT = step.objective.token_losses(params, batch)
    num_bins = len(edges) - 1
    bins = jnp.searchsorted(jnp.asarray(edges, jnp.int32), batch.positions, side="right") - 1

    def sum_by_bin(values_BT):
        return jax.ops.segment_sum(values_BT.reshape(-1), bins.reshape(-1), num_segments=num_bins)

    weighted_BT = batch.loss_weights * losses_BT
    return PositionSums(sum_by_bin(batch.loss_weights), sum_by_bin(weighted_BT), sum_by_bin(weighted_BT * losses_BT))
