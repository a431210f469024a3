"""Unigram and bigram baselines: the losses that token counts alone achieve, and that a model must beat."""

from collections.abc import Iterator

import numpy as np

from jaxlc.data.sequences.mixed import PackedText

_MAX_TRAIN_TOKENS = 50_000_000
_CHUNK_TOKENS = 4_000_000  # pairs sorted at one time


def ngram_losses(
    train: PackedText, heldout: PackedText, num_heldout_sequences: int, vocab_size: int
) -> tuple[float, float]:
    """Returns the mean losses (unigram, bigram) in nats over the weighted targets of the first held-out sequences.

    Counts are taken from the first 50M tokens of the training documents, over the pairs (token, next token) within a
    document. With V the vocabulary size, c the counts, n(x) the number of tokens counted after x, and d(x) the number
    of distinct ones:

        unigram   p(y)     = (c(y) + 1) / (n + V)                          add-one smoothing (Laplace)
        bigram    p(y | x) = (c(x, y) + d(x) p(y)) / (n(x) + d(x))         interpolated (Witten and Bell 1991)

    and p(y | x) = p(y) if x never occurs in training. Memory is proportional to the number of distinct pairs, not to V
    squared.
    """
    pairs, pair_counts = _count_pairs(train, vocab_size)
    befores, afters = np.divmod(pairs, vocab_size)
    unigram_V = np.bincount(afters, pair_counts, vocab_size) + 1
    unigram_V /= unigram_V.sum()
    followers_V = np.bincount(befores, pair_counts, vocab_size)
    distinct_followers_V = np.bincount(befores, minlength=vocab_size)

    sequences = [heldout[i] for i in range(num_heldout_sequences)]
    names = ("tokens", "targets", "loss_weights")
    x, y, weights = (np.concatenate([sequence[name] for sequence in sequences]) for name in names)
    heldout_pairs = x.astype(np.int64) * vocab_size + y
    at = np.minimum(np.searchsorted(pairs, heldout_pairs), len(pairs) - 1)
    counts = np.where(pairs[at] == heldout_pairs, pair_counts[at], 0)
    unigram = unigram_V[y]
    denominators = np.maximum(followers_V[x] + distinct_followers_V[x], 1)
    bigram = np.where(followers_V[x] > 0, (counts + distinct_followers_V[x] * unigram) / denominators, unigram)
    return tuple(float(-np.average(np.log(p), weights=weights)) for p in (unigram, bigram))


def _count_pairs(train: PackedText, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct pairs (token * vocab_size + next token), int64, sorted, and how often each occurs."""
    counted = [np.unique(pairs, return_counts=True) for pairs in _train_pairs(train, vocab_size)]
    pairs, pair_of = np.unique(np.concatenate([pairs for pairs, _ in counted]), return_inverse=True)
    return pairs, np.bincount(pair_of, np.concatenate([counts for _, counts in counted]), len(pairs))


def _train_pairs(train: PackedText, vocab_size: int) -> Iterator[np.ndarray]:
    """Yields all pairs within training documents, in chunks of entire documents."""
    chunk, chunk_tokens, num_remaining = [], 0, _MAX_TRAIN_TOKENS
    for document in train.documents():
        tokens = document[:num_remaining].astype(np.int64)
        chunk.append(tokens[:-1] * vocab_size + tokens[1:])
        chunk_tokens += len(tokens)
        num_remaining -= len(tokens)
        if chunk_tokens >= _CHUNK_TOKENS:
            yield np.concatenate(chunk)
            chunk, chunk_tokens = [], 0
        if not num_remaining:
            break
    if chunk:
        yield np.concatenate(chunk)
