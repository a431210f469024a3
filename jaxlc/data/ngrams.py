"""What counting alone can predict: the losses that a model must beat."""

from collections.abc import Iterator

import numpy as np

from jaxlc.data.packing import PackedRows

_MAX_TRAIN_TOKENS = 50_000_000
_CHUNK_TOKENS = 4_000_000  # pairs sorted at one time


def ngram_losses(train: PackedRows, heldout: PackedRows, num_heldout_rows: int, vocab_size: int) -> tuple[float, float]:
    """Mean losses (unigram, bigram) in nats over the weighted targets of the first `num_heldout_rows` held-out rows.

    Counts are of the first 50M tokens of the training documents, each token but a document's first after the one
    before it. With V the vocabulary, c the counts, n(x) the tokens counted after x, d(x) the distinct ones:

        unigram   p(y)     = (c(y) + 1) / (n + V)                          add one (Laplace)
        bigram    p(y | x) = (c(x, y) + d(x) p(y)) / (n(x) + d(x))         interpolated (Witten and Bell 1991)

    and p(y | x) = p(y) after an x never seen. Memory follows the number of distinct pairs, not V squared.
    """
    pairs, pair_counts = _count_pairs(train, vocab_size)
    befores, afters = np.divmod(pairs, vocab_size)
    unigram_V = np.bincount(afters, pair_counts, vocab_size) + 1
    unigram_V /= unigram_V.sum()
    followers_V = np.bincount(befores, pair_counts, vocab_size)
    distinct_followers_V = np.bincount(befores, minlength=vocab_size)

    rows = [heldout[i] for i in range(num_heldout_rows)]
    x, y, weights = (np.concatenate([row[name] for row in rows]) for name in ("tokens", "targets", "loss_weights"))
    wanted = x.astype(np.int64) * vocab_size + y
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    counts = np.where(pairs[at] == wanted, pair_counts[at], 0)
    unigram = unigram_V[y]
    seen = np.maximum(followers_V[x] + distinct_followers_V[x], 1)
    bigram = np.where(followers_V[x] > 0, (counts + distinct_followers_V[x] * unigram) / seen, unigram)
    return tuple(float(-np.average(np.log(p), weights=weights)) for p in (unigram, bigram))


def _count_pairs(train: PackedRows, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct pairs (token * vocab_size + next token), int64, sorted, and how often each occurs."""
    counted = [np.unique(pairs, return_counts=True) for pairs in _train_pairs(train, vocab_size)]
    pairs, pair_of = np.unique(np.concatenate([pairs for pairs, _ in counted]), return_inverse=True)
    return pairs, np.bincount(pair_of, np.concatenate([counts for _, counts in counted]), len(pairs))


def _train_pairs(train: PackedRows, vocab_size: int) -> Iterator[np.ndarray]:
    """All pairs within training documents, in chunks of whole documents."""
    store, chunk, chunk_tokens, left = train.store, [], 0, _MAX_TRAIN_TOKENS
    for document in train.document_ids:
        begin, end = store.offsets[document], store.offsets[document + 1]
        tokens = store.tokens[begin : min(end, begin + left)].astype(np.int64)
        chunk.append(tokens[:-1] * vocab_size + tokens[1:])
        chunk_tokens += len(tokens)
        left -= len(tokens)
        if chunk_tokens >= _CHUNK_TOKENS:
            yield np.concatenate(chunk)
            chunk, chunk_tokens = [], 0
        if not left:
            break
    if chunk:
        yield np.concatenate(chunk)
