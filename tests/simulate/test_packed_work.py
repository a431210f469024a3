"""Pairs of packed sequences by ring step, against counts on dense masks and against the layout's
own count.
"""

import numpy as np
import pytest

from jaxlc.attention.contract import AttentionSpec
from jaxlc.attention.kernels.cudnn_packed import calls_for, document_table
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.attention.query_tiles import tiles_of
from jaxlc.config import defaults, load
from jaxlc.config.flops import causal_pairs
from jaxlc.hlo.kernel_costs import AttentionKernelCall, Sizes
from jaxlc.sharding.document_layout import document_order, ring_cost, zigzag_order
from jaxlc.simulate.packed_work import (
    AttentionWork,
    mean_of_microbatches,
    one_document,
    sequence_work,
)
from jaxlc.simulate.time_model import visible_fraction
from jaxlc.step.batch import choose_order, in_zigzag_order

TOKENS, CONTEXT = 4096, 4
LENGTHS = (1500, 1, 700, 90, 1205, 400)  # 200 tokens of padding
ZIGZAG = in_zigzag_order(TOKENS, CONTEXT).of


def by_document(sequence):
    return document_order(sequence["segment_ids"], CONTEXT)


def config_with(tokens: int = TOKENS, context: int = CONTEXT, **sections):
    config = defaults()
    config.mesh.context, config.data.seq_len = context, tokens
    for section, settings in sections.items():
        config[section].update(settings)
    return load(config)


def dense_work(
    lengths, order_T, num_ranks, window=TOKENS, queries=slice(None), prefixes=None
) -> np.ndarray:
    """[query ranks, key ranks]: visible pairs of some queries of the layout, counted on the mask in
    natural order.

    With `prefixes`, pairs of a branch and its prefix are counted instead of those within a
    document.
    """
    document_T = np.pad(
        np.repeat(np.arange(1, len(lengths) + 1), lengths), (0, TOKENS - sum(lengths))
    )
    positions_T = np.arange(TOKENS)
    attended_T = document_T if prefixes is None else np.array([0, *prefixes])[document_T]
    mask_TS = (
        (attended_T[:, None] == document_T)
        & (document_T > 0)
        & (positions_T[:, None] >= positions_T)
    )
    mask_TS &= positions_T[:, None] - positions_T < window
    is_query_T = np.zeros(TOKENS, bool)
    is_query_T[queries] = True
    mask_TS = mask_TS[np.ix_(order_T, order_T)] & is_query_T[:, None]
    return mask_TS.reshape(num_ranks, -1, num_ranks, TOKENS // num_ranks).sum(axis=(1, 3))


def by_step(work) -> np.ndarray:
    ranks = len(work)
    return np.array(
        [[work[rank, (rank - step) % ranks] for rank in range(ranks)] for step in range(ranks)]
    )


def test_work_of_shared_prefixes_equals_dense_count():
    """The slowest rank of a ring step is the one with the most pairs of all kernel calls."""
    lengths, prefixes = (1500, 300, 500, 90, 1205, 200, 200), (0, 1, 1, 0, 0, 5, 6)
    result = sequence_work(
        config_with(attention=dict(shared_prefixes=2)), ZIGZAG, lengths, prefixes
    )
    order_T = zigzag_order(TOKENS, CONTEXT)
    own, prefix, further = (
        by_step(dense_work(lengths, order_T, CONTEXT, prefixes=x))
        for x in (None, prefixes, (0, 0, 0, 0, 0, 0, 5))
    )
    prefix += further
    slowest = (own + prefix).argmax(axis=1)
    own, prefix = (x[np.arange(CONTEXT), slowest] for x in (own, prefix))
    assert result.work[:2] == (own[0], own[1:].mean())
    assert (result.work.prefix_own_pairs, result.work.prefix_ring_step_pairs) == (
        prefix[0],
        prefix[1:].mean(),
    )
    num_layers = load(defaults()).model.num_layers
    pairs = [
        causal_pairs(1500),
        *(causal_pairs(1500 + n) - causal_pairs(1500) for n in (300, 500)),
        causal_pairs(90),
    ]
    assert result.pairs == num_layers * (sum(pairs) + causal_pairs(1605))


def test_attention_of_a_prompt_with_8_answers_is_that_of_the_lengths():
    """At most 1.05 of the pairs, counted from the lengths: both kernel calls of each ring step, on
    its slowest rank.
    """
    prompt, answer, count, context = 131_072, 8192, 8, 8
    config = config_with(prompt + count * answer, context, attention=dict(shared_prefixes=True))
    order = choose_order(config, context)
    result = sequence_work(config, order.of, (prompt, *[answer] * count), (0, *[1] * count))
    slowest = result.work.total
    pairs = prompt**2 / 2 + count * (prompt * answer + answer**2 / 2)
    assert result.pairs <= 1.0001 * pairs * config.model.num_layers
    assert pairs <= 1.0001 * context * slowest <= 1.05 * pairs


def test_work_of_zigzag_order_equals_dense_count():
    config = config_with()
    result = sequence_work(config, ZIGZAG, LENGTHS)
    steps = by_step(dense_work(LENGTHS, zigzag_order(TOKENS, CONTEXT), CONTEXT))
    slowest = steps.max(axis=1)
    assert result.work[:3] == (slowest[0], slowest[1:].mean(), steps.sum(axis=0).max())
    assert result.ring_cost == pytest.approx(slowest.sum() * CONTEXT / steps.sum())
    pairs = sum(causal_pairs(length) for length in LENGTHS)
    assert result.pairs == config.model.num_layers * pairs and steps.sum() == pairs


def test_work_in_tiles_is_that_of_the_slowest_rank_in_each_tile():
    config = config_with(memory=dict(tile_tokens=TOKENS // (2 * CONTEXT), remat="full"))
    result = sequence_work(config, ZIGZAG, LENGTHS)
    order_T, tiles = (
        zigzag_order(TOKENS, CONTEXT),
        np.asarray(tiles_of(np.arange(TOKENS)[None], CONTEXT, 2))[:, 0],
    )
    slowest = sum(
        by_step(dense_work(LENGTHS, order_T, CONTEXT, queries=tile)).max(axis=1) for tile in tiles
    )
    assert result.work[:2] == (slowest[0], slowest[1:].mean())
    assert result.ring_cost > sequence_work(config_with(), ZIGZAG, LENGTHS).ring_cost


def test_work_of_shared_prefixes_in_tiles_equals_dense_count():
    lengths, prefixes = (1500, 300, 500, 90, 1205, 400), (0, 1, 1, 0, 0, 5)
    sections = dict(
        memory=dict(tile_tokens=TOKENS // (2 * CONTEXT), remat="full"),
        attention=dict(shared_prefixes=True),
    )
    work = sequence_work(config_with(**sections), ZIGZAG, lengths, prefixes).work
    order_T, tiles = (
        zigzag_order(TOKENS, CONTEXT),
        np.asarray(tiles_of(np.arange(TOKENS)[None], CONTEXT, 2))[:, 0],
    )
    expected = np.zeros((2, CONTEXT), int)
    for tile in tiles:
        own, prefix = (
            by_step(dense_work(lengths, order_T, CONTEXT, queries=tile, prefixes=x))
            for x in (None, prefixes)
        )
        slowest = (own + prefix).argmax(axis=1)
        expected += [x[np.arange(CONTEXT), slowest] for x in (own, prefix)]
    own, prefix = expected
    assert (work.own_pairs, work.ring_step_pairs) == (own[0], own[1:].mean())
    assert (work.prefix_own_pairs, work.prefix_ring_step_pairs) == (prefix[0], prefix[1:].mean())
    calls = [AttentionKernelCall(None, "pallas", "forward", 1.0, True, Sizes(4, 1024, 1024), is_over_prefix=x)
             for x in (False, True)]  # fmt: skip
    fractions = [visible_fraction(call, config_with(**sections), work) for call in calls]
    np.testing.assert_allclose(np.divide(*fractions), own.sum() / prefix.sum())


def test_work_of_document_order_equals_dense_count():
    result = sequence_work(config_with(), by_document, LENGTHS)
    segments_T = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)
    order_T = by_document(dict(segment_ids=np.pad(segments_T, (0, TOKENS - sum(LENGTHS)))))
    work = by_step(dense_work(LENGTHS, order_T, CONTEXT))
    slowest = work.max(axis=1)
    assert result.work[:2] == (slowest[0], slowest[1:].mean())
    assert result.ring_cost == pytest.approx(ring_cost(work)) and result.ring_cost < 1.1


@pytest.mark.parametrize(
    "strategy, num_ranks, degree", [("hybrid", 2, 2), ("all_gather", 4, 1), ("ulysses", 1, 1)]
)
def test_work_by_strategy_equals_dense_count(strategy, num_ranks, degree):
    config = config_with(attention=dict(strategy=strategy, ulysses_degree=degree))
    result = sequence_work(config, ZIGZAG, LENGTHS)
    work = dense_work(LENGTHS, zigzag_order(TOKENS, CONTEXT), num_ranks)
    steps = work.sum(axis=1)[None] if strategy == "all_gather" else by_step(work)
    rest = steps.max(axis=1)[1:]
    assert result.work[:2] == (steps[0].max(), rest.mean() if len(rest) else 0)


def table_calls(lengths, order_T, num_ranks, few_documents) -> np.ndarray:
    """[query ranks, key ranks]: calls in the loop, from the kernel's own table."""
    local_tokens = TOKENS // num_ranks
    segments_T = np.pad(
        np.repeat(np.arange(1, len(lengths) + 1), lengths), (0, TOKENS - sum(lengths))
    )
    ranks = [TokenInfo(*(x.reshape(num_ranks, 1, -1)[rank] for x in (order_T, segments_T[order_T])))
             for rank in range(num_ranks)]  # fmt: skip
    calls = np.zeros((num_ranks, num_ranks), int)
    for query_rank, key_rank in np.ndindex(calls.shape):
        ranges = key_ranges(ranks[query_rank], ranks[key_rank], AttentionSpec())
        is_own = query_rank == key_rank
        sizes = calls_for(1, local_tokens, local_tokens, causal=is_own, few_documents=few_documents)
        table, first = (
            document_table(*ranges, local_tokens, sizes, causal=is_own),
            sizes.num_documents,
        )
        while sizes.repeated and first < table.num_documents:
            first += sizes.repeated[int(table.bucket_of(first)) - len(sizes.sizes)].num_documents
            calls[query_rank, key_rank] += 1
    return calls


@pytest.mark.parametrize(
    "order_of, context, few_documents",
    [
        (ZIGZAG, CONTEXT, False),
        (by_document, CONTEXT, True),
        (in_zigzag_order(TOKENS, 1).of, 1, False),
    ],
)
def test_further_calls_equal_those_of_the_document_table(order_of, context, few_documents):
    lengths = (*[3] * 30, *[20] * 30, *[300] * 3, 200, 1500)
    segments_T = np.pad(
        np.repeat(np.arange(1, len(lengths) + 1), lengths), (0, TOKENS - sum(lengths))
    )
    order_T = order_of(dict(segment_ids=segments_T))
    own, *others = by_step(table_calls(lengths, order_T, context, few_documents)).max(axis=1)
    work = sequence_work(
        config_with(context=context), order_of, lengths, few_documents=few_documents
    ).work
    assert (work.own_further_calls, work.ring_step_further_calls) == (
        own,
        np.mean(others) if others else 0,
    )
    assert own >= 1 and (not few_documents or not any(others))


def test_work_of_window_equals_dense_count():
    config = config_with(model=dict(layer_kinds="sliding,full", window=100))
    result = sequence_work(config, ZIGZAG, LENGTHS)
    rank_pairs = dense_work(LENGTHS, zigzag_order(TOKENS, CONTEXT), CONTEXT, window=100).sum(axis=1)
    assert result.work.window_pairs == rank_pairs.max()


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_one_document_has_the_default_work(strategy):
    """Half of all pairs, up to the diagonal; in a window, ranks with the first tokens have fewer."""
    config = config_with(
        attention=dict(strategy=strategy), model=dict(layer_kinds="sliding,full", window=100)
    )
    for order_of in (ZIGZAG, by_document):
        expected, actual = one_document(config), sequence_work(config, order_of, [TOKENS]).work
        np.testing.assert_allclose(actual, expected, rtol=0.02)


def test_visible_fraction_follows_the_work():
    config = config_with()
    work = AttentionWork(own_pairs=1024 * 256, ring_step_pairs=1024 * 128, window_pairs=0)
    own = AttentionKernelCall(None, "pallas", "forward", 1.0, True, Sizes(4, 1024, 1024))
    assert visible_fraction(own, config, work) == 0.25
    assert visible_fraction(own._replace(is_ring_step=True), config, work) == 0.125
    halves = own._replace(sizes=Sizes(8, 512, 512), is_ring_step=True)
    assert visible_fraction(halves, config, work) == 0.25
    assert visible_fraction(own._replace(is_masked=False), config, work) == 1.0


def test_mean_of_microbatches_takes_the_slowest_replica_of_balanced_batches():
    config = config_with(
        mesh=dict(fsdp=2), train=dict(global_batch_size=8, gradient_accumulation_steps=2)
    )
    whole, short = (sequence_work(config, ZIGZAG, lengths) for lengths in ([TOKENS], [64] * 64))
    # Two microbatches of two replicas of two sequences: both long sequences are in the first one.
    sequences = [whole, short, short, short] * 2
    first = (np.array(whole.work) + short.work) / 2
    expected = (first + short.work) / 2
    ((share, work),) = mean_of_microbatches(config, sequences)
    np.testing.assert_allclose((share, *work), (1.0, *expected))


def test_mean_of_microbatches_separates_those_that_skip_ring_steps():
    def order_of(sequence):
        return document_order(sequence["segment_ids"], CONTEXT, skips_ring_steps=True)

    train = dict(global_batch_size=4, gradient_accumulation_steps=4)
    config, lengths = config_with(train=train), [900, 800, 1000, 600, 500, 200]
    short, whole = (
        sequence_work(config, order_of, x, skips_ring_steps=True) for x in (lengths, [TOKENS])
    )
    all_steps = sequence_work(config, order_of, lengths).work
    assert (short.work.num_other_steps, whole.work.num_other_steps, all_steps.num_other_steps) == (
        1,
        3,
        3,
    )
    assert all_steps.ring_step_pairs > 0
    np.testing.assert_allclose(short.work.in_steps(3), all_steps)
    sequences = [whole, short, short, short]
    assert mean_of_microbatches(config, sequences) == [(0.25, whole.work), (0.75, short.work)]
    config = config_with(train={**train, "gradient_accumulation_steps": 1})  # all in one microbatch
    ((share, work),) = mean_of_microbatches(config, sequences)
    np.testing.assert_allclose(
        (share, *work), (1, *(np.array(whole.work) + 3 * np.array(all_steps)) / 4)
    )


def test_small_trees_are_balanced_as_in_a_run():
    """The order of a run, which also counts the pairs over prefixes."""
    lengths, prefixes = (60, 25, 25, 25) * 24, [p for i in range(24) for p in (0, *[4 * i + 1] * 3)]
    config = config_with(4096, 4, attention=dict(shared_prefixes=1))
    order = choose_order(config, 4)
    assert sequence_work(config, order.of, lengths, prefixes).ring_cost < 1.1
