"""Places of sequences in microbatches and replicas: replica costs, and the batches of a run."""

import itertools

import numpy as np
import pytest

from jaxlc.config.flops import document_pairs
from jaxlc.data import open_corpus
from jaxlc.data.sequences.packing import balanced_order, replica_cost
from jaxlc.plan.packing_estimates import mix_of_lengths
from jaxlc.train.stage_setup import training_batches
from tests.data.corpora import make_config
from tests.step.synthetic import TOKENS as S
from tests.step.synthetic import small_config, small_step


def config_with(microbatches: int, replicas: int, per_replica: int = 1, **sections):
    train = dict(
        global_batch_size=microbatches * replicas * per_replica,
        gradient_accumulation_steps=microbatches,
        eval_sequences=replicas,
    )
    return small_config(train=train, mesh=dict(fsdp=replicas), **sections)


def test_balanced_order_has_lowest_cost_of_all_orders():
    """With one sequence per replica; with several, it is at most that of the natural order."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        pairs = rng.integers(0, 1000, 6)
        for microbatches in (1, 2, 3, 6):
            config = config_with(microbatches, 6 // microbatches)
            orders = itertools.permutations(range(6))
            lowest = min(replica_cost(config, pairs[list(order)]) for order in orders)
            assert replica_cost(config, pairs[balanced_order(config, pairs)]) == pytest.approx(
                lowest
            )
        config, pairs = config_with(2, 2, 3), rng.integers(0, 1000, 12)
        order = balanced_order(config, pairs)
        assert sorted(order) == list(range(12)) and replica_cost(
            config, pairs[order]
        ) <= replica_cost(config, pairs)
    assert replica_cost(config_with(2, 2), np.array([4, 2, 1, 1])) == (4 + 1) / (3 + 1)


@pytest.mark.parametrize(
    "microbatches, natural, limit", [(8, 1.47, 1.07), (2, 1.47, 1.25), (1, 1.47, 1.49)]
)
def test_replica_cost_of_mix(microbatches, natural, limit):
    """The mean of 32 steps of 8 replicas."""
    rng, costs = np.random.default_rng(0), []
    config = config_with(microbatches, 8)
    for _ in range(32):
        lengths = [mix_of_lengths(rng, 131_072) for _ in range(8 * microbatches)]
        pairs = np.array([document_pairs(config.model, part) for part in lengths])
        costs.append(
            [replica_cost(config, pairs[order]) for order in (..., balanced_order(config, pairs))]
        )
    before, after = np.mean(costs, axis=0)
    assert before == pytest.approx(natural, abs=0.05) and after <= limit


def test_order_without_gain_is_natural():
    natural = list(range(8))
    assert balanced_order(config_with(4, 2), [5] * 8).tolist() == natural  # equal work
    assert balanced_order(config_with(8, 1), natural).tolist() == natural  # one replica
    assert balanced_order(config_with(1, 8), natural).tolist() == natural  # no choice


def run_batches(corpus, config, first: int, num_steps: int) -> list[np.ndarray]:
    """Segment ids and tokens of the steps of a run, int32 [2, A, B, S]."""
    stream = training_batches(corpus, small_step(config), first, num_steps)
    steps = [next(stream)[0] for _ in range(num_steps)]
    stream.close()
    return [np.stack([step["segment_ids"], step["tokens"]]) for step in steps]


def test_run_has_each_sequence_of_a_step_once(tmp_path):
    """With a lower replica cost, and the same after a resume; the first index is no multiple of the
    batch size.
    """
    corpus = open_corpus(make_config(tmp_path, seq_len=S))
    config = config_with(4, 2)
    steps = run_batches(corpus, config, first=12, num_steps=3)
    moved = 0
    for step, batch in enumerate(steps):
        indices = range(12 + 8 * step, 20 + 8 * step)
        natural = np.stack(
            [[corpus.train[i][name] for i in indices] for name in ("segment_ids", "tokens")]
        )
        rows, expected = (
            sorted(np.moveaxis(b.reshape(2, 8, S), 1, 0).tolist()) for b in (batch, natural)
        )
        assert rows == expected
        works = [
            np.array(
                [
                    document_pairs(config.model, np.bincount(row)[1:])
                    for row in part[0].reshape(8, S)
                ]
            )
            for part in (natural, batch)
        ]
        costs = [replica_cost(config, pairs) for pairs in works]
        assert costs[1] <= costs[0]
        moved += costs[1] < costs[0]
    assert moved
    np.testing.assert_array_equal(run_batches(corpus, config, first=20, num_steps=2), steps[1:])
    unmasked = config_with(4, 2, attention=dict(document_mask=False))
    (batch,) = run_batches(corpus, unmasked, first=12, num_steps=1)
    np.testing.assert_array_equal(
        batch[1].reshape(8, S), [corpus.train[i]["tokens"] for i in range(12, 20)]
    )
