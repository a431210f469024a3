"""The balance of packed sequences over context ranks: zigzag order, the best packing order,
per-document sharding.

    python -m benchmarks.document_balance              # tables of 2026-11-27-packed-documents.md; a minute
    python -m benchmarks.document_balance --image      # docs/images/packing_balance.png

Work is the number of pairs of a query and a key that it attends to. Ring cost is the sum over ring
steps of the maximum over ranks, relative to the mean work of a rank: the ring steps are
synchronized. Runs on the host.
"""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from absl import app, flags

from jaxlc.config import defaults, load
from jaxlc.core import plot_style
from jaxlc.data.sequences.packing import best_fit
from jaxlc.data.texts.sources import PYTHON_STDLIB, list_files
from jaxlc.plan.packing_estimates import mix_of_lengths
from jaxlc.sharding.document_balance import pairs_by_rank, sequence_pieces, tokens_by_rank
from jaxlc.sharding.document_layout import (
    by_ring_step,
    chained_order,
    document_order,
    ring_cost,
    zigzag_order,
)
from jaxlc.simulate.packed_work import sequence_work
from jaxlc.step.batch import choose_order

TOKENS, CONTEXT = 524_288, 8
_NUM_SEQUENCES = 30
_WINDOW_CASES, _WINDOWS, _NUM_WINDOW_SEQUENCES = (
    ((65_536, 8), (262_144, 8), (524_288, 8)),
    (128, 1024, 4096),
    10,
)
_CHAINS, _NUM_CHAIN_SEQUENCES = (4, 6, 8, 12), 20
# random orders of the documents that "best packing order" tries, and two sorted ones
_NUM_ORDERS = 64
_IMAGE = Path(__file__).parents[1] / "docs" / "images" / "packing_balance.png"
_ORDERS = ("zigzag", "best packing order", "per-document sharding")


def packed(lengths: np.ndarray, num_tokens: int, num_sequences: int) -> list[np.ndarray]:
    """Lengths by sequence of a corpus, packed as in data/sequences/packing.py: long documents are
    cut first.
    """
    chunks = [
        min(num_tokens, length - begin)
        for length in lengths
        for begin in range(0, length, num_tokens)
    ]
    lengths, sequence_of = np.array(chunks), best_fit(np.array(chunks), num_tokens)
    rng = np.random.default_rng(0)
    chosen = rng.permutation(sequence_of.max() + 1)[:num_sequences]
    return [rng.permutation(lengths[sequence_of == sequence]) for sequence in chosen]


def stdlib_lengths(bytes_per_token: int = 1) -> np.ndarray:
    """Tokens of the sources of Python's standard library, with an end token each."""
    files, _ = list_files((PYTHON_STDLIB,))
    return np.array([file.size_bytes // bytes_per_token + 1 for file in files])


def zigzag_ring_work(lengths: np.ndarray, num_tokens: int, context: int) -> np.ndarray:
    """int64 [ring steps, ranks]: the work of documents in this order, with the sequence in zigzag
    order.
    """
    ends = np.cumsum(lengths)
    chunks = np.arange(2 * context + 1) * (num_tokens // (2 * context))
    begins_DC, ends_DC = (
        np.maximum((ends - lengths)[:, None], chunks[:-1]),
        np.minimum(ends[:, None], chunks[1:]),
    )
    tokens_DC = np.maximum(ends_DC - begins_DC, 0)  # tokens of each document in each chunk
    work_CC = np.tril(tokens_DC.T @ tokens_DC, -1)
    np.fill_diagonal(work_CC, (tokens_DC * (tokens_DC + 1) // 2).sum(axis=0))
    pairs = np.concatenate([np.arange(context), np.arange(context)[::-1]])  # the rank of each chunk
    work = np.zeros((context, context), np.int64)
    np.add.at(work, np.ix_(pairs, pairs), work_CC)
    return by_ring_step(work)


def best_order_ring_work(lengths: np.ndarray, num_tokens: int, context: int) -> np.ndarray:
    """As `zigzag_ring_work`, of the best of several orders of the documents."""
    rng = np.random.default_rng(0)
    orders = [
        np.sort(lengths),
        np.sort(lengths)[::-1],
        *(rng.permutation(lengths) for _ in range(_NUM_ORDERS)),
    ]
    return min((zigzag_ring_work(order, num_tokens, context) for order in orders), key=ring_cost)


def sharded_work(lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """As `zigzag_ring_work`, with per-document sharding; and the most tokens of a rank that other
    ranks need.
    """
    segments_T = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    segments_T = np.pad(segments_T, (0, TOKENS - len(segments_T)))
    order_T = document_order(segments_T, CONTEXT)
    pieces = sequence_pieces(segments_T, order_T, CONTEXT, np.zeros_like(order_T))
    tokens_RD = tokens_by_rank(pieces, len(lengths), CONTEXT, 1)[0]
    is_shared_D = (tokens_RD > 0).sum(axis=0) > 1
    num_shared = int(tokens_RD[:, is_shared_D].sum(axis=1).max())
    return by_ring_step(pairs_by_rank(pieces, CONTEXT, 1)[0]), num_shared


def ring_works(lengths: np.ndarray) -> list[np.ndarray]:
    """The ring work of a sequence with each of `_ORDERS`."""
    return [
        zigzag_ring_work(lengths, TOKENS, CONTEXT),
        best_order_ring_work(lengths, TOKENS, CONTEXT),
        sharded_work(lengths)[0],
    ]


def corpora() -> Iterator[tuple[str, list[np.ndarray]]]:
    """(name, lengths of the documents of each sequence)"""
    rng = np.random.default_rng(0)
    yield (
        "60% in documents over 64K, each sequence",
        [mix_of_lengths(rng, TOKENS) for _ in range(_NUM_SEQUENCES)],
    )
    corpus = np.concatenate([mix_of_lengths(rng, TOKENS) for _ in range(2 * _NUM_SEQUENCES)])
    yield "the same documents as a corpus, packed", packed(corpus, TOKENS, _NUM_SEQUENCES)
    yield "Python's standard library, bytes", packed(stdlib_lengths(), TOKENS, _NUM_SEQUENCES)
    yield (
        "Python's standard library, 4 bytes per token",
        packed(stdlib_lengths(4), TOKENS, _NUM_SEQUENCES),
    )


def table() -> Iterator[str]:
    """Lines of Markdown: mean and worst ring cost; and, with per-document sharding, how many
    sequences need all ring steps, and the mean share of tokens that other ranks need."""
    yield f"| sequences | {' | '.join(_ORDERS)} | all ring steps | tokens that other ranks need |"
    yield "| --- |" + " --- |" * (len(_ORDERS) + 2)
    for name, sequences in corpora():
        costs = np.array(
            [[ring_cost(work) for work in ring_works(lengths)] for lengths in sequences]
        )
        cells = (
            f"{mean:.3f} ({worst:.3f})"
            for mean, worst in zip(costs.mean(axis=0), costs.max(axis=0))
        )
        works, num_shared = zip(*map(sharded_work, sequences))
        num_complete = sum(work.any(axis=1).all() for work in works)
        shared = np.mean(num_shared) * CONTEXT / TOKENS
        yield f"| {name} ({len(sequences)}) | {' | '.join(cells)} | {num_complete} | {shared:.0%} |"


def window_table() -> Iterator[str]:
    """Lines of Markdown: mean ring cost of full layers in models with sliding layers too, and how
    many sequences remain in zigzag order, since their pieces need more windows of other ranks than
    there is room for."""
    yield "| tokens | ranks | window | mean ring cost | sequences in zigzag order |"
    yield "| --- | --- | --- | --- | --- |"
    for (num_tokens, context), window in itertools.product(_WINDOW_CASES, _WINDOWS):
        config = defaults()
        config.model.update(layer_kinds="sliding,full", attention=dict(window=window))
        config.mesh.context, config.data.seq_len = context, num_tokens
        order_of, zigzag_T = (
            choose_order(load(config), context).of,
            zigzag_order(num_tokens, context),
        )
        rng, costs, num_zigzag = np.random.default_rng(0), [], 0
        for _ in range(_NUM_WINDOW_SEQUENCES):
            lengths = mix_of_lengths(rng, num_tokens)
            costs.append(sequence_work(load(config), order_of, lengths).ring_cost)
            segments_T = np.repeat(np.arange(1, len(lengths) + 1), lengths)
            padded_T = np.pad(segments_T, (0, num_tokens - len(segments_T)))
            num_zigzag += np.array_equal(order_of({"segment_ids": padded_T}), zigzag_T)
        share = f"{num_zigzag} of {len(costs)}"
        yield f"| {num_tokens:,} | {context} | {window:,} | {np.mean(costs):.2f} | {share} |"


def chain_table() -> Iterator[str]:
    """Lines of Markdown: mean (worst) ring cost of full layers in models with recurrent layers too,
    by the largest number of documents that are cut into pieces for all ranks."""
    yield f"| tokens | zigzag | {' | '.join(f'{chains - 1} documents' for chains in _CHAINS)} |"
    yield "| --- |" + " --- |" * (len(_CHAINS) + 1)
    for num_tokens, context in _WINDOW_CASES:
        rng = np.random.default_rng(0)
        sequences = [mix_of_lengths(rng, num_tokens) for _ in range(_NUM_CHAIN_SEQUENCES)]
        zigzag = np.mean(
            [ring_cost(zigzag_ring_work(lengths, num_tokens, context)) for lengths in sequences]
        )
        cells = []
        for num_chains in _CHAINS:
            config = defaults()
            config.mesh.context, config.data.seq_len = context, num_tokens
            order_of = functools.partial(_chained_order, context=context, num_chains=num_chains)
            costs = [
                sequence_work(load(config), order_of, lengths).ring_cost for lengths in sequences
            ]
            cells.append(f"{np.mean(costs):.2f} ({np.max(costs):.2f})")
        yield f"| {num_tokens:,} | {zigzag:.2f} | {' | '.join(cells)} |"


def _chained_order(sequence: dict[str, np.ndarray], context: int, num_chains: int) -> np.ndarray:
    return chained_order(
        sequence["segment_ids"], context, num_chains=num_chains, min_tokens=3
    ).order_T


def draw(lengths: np.ndarray, path: Path) -> None:
    """Draws the work of the ranks over time, with synchronized ring steps, for each of `_ORDERS`."""
    # 1: the mean work of a rank
    works = [work * CONTEXT / work.sum() for work in ring_works(lengths)]
    figure = plot_style.new_figure(7.6, 5.4, dpi=150)
    panels = figure.subplots(len(works), sharex=True)
    for panel, name, work in zip(panels, _ORDERS, works):
        begins = np.concatenate([[0], np.cumsum(work.max(axis=1))])
        for step, (begin, end) in enumerate(zip(begins[:-1], begins[1:])):
            color = plot_style.BLUE if step % 2 == 0 else plot_style.TEAL
            panel.barh(
                range(CONTEXT), work[step], left=begin, height=0.72, color=color, linewidth=0
            )
            panel.axvline(end, color=plot_style.SILVER, linewidth=0.8, zorder=0)
        panel.set_title(f"{name}: {begins[-1]:.2f}", loc="left", fontsize=10)
        panel.set(ylabel="context rank", yticks=range(CONTEXT), ylim=(CONTEXT - 0.4, -0.6))
        panel.tick_params(length=0, labelsize=8)
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel(
        "time of attention, relative to equal work on all ranks; lines are the ends of ring steps"
    )
    panels[-1].set_xlim(left=0)
    figure.savefig(path)


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    flags.DEFINE_boolean(
        "image", False, f"write {_IMAGE.name} instead of the table", flag_values=values
    )


def main(_) -> None:
    if flags.FLAGS.image:
        draw(mix_of_lengths(np.random.default_rng(0), TOKENS), _IMAGE)
    else:
        print("\n".join([*table(), "", *window_table(), "", *chain_table()]))


if __name__ == "__main__":
    define_flags()
    app.run(main)
