"""Sequences of documents that continue others: the nodes of trees, in pre-order."""

import numpy as np

# For each document its length, and the number from 1 of the document that it continues; 0: none.
Documents = list[tuple[int, int]]


def random_documents(num_tokens: int, num_levels: int, seed: int = 0) -> Documents:
    """Trees of nodes with odd lengths and of two tokens, some with `num_levels` prefixes; padding is
    left at the end.
    """
    rng, documents, path = np.random.default_rng(seed), [], []
    while True:
        length = int(rng.choice([1, 1, 2, 2, 3, 5, 7, 9, 13, 21]))
        if sum(x for x, _ in documents) + length > num_tokens - 5:
            return documents
        depth = rng.integers(min(len(path), num_levels) + 1)
        path = path if len(documents) <= num_levels else path[:depth]
        documents.append((length, path[-1] if path else 0))
        path = [*path, len(documents)]


def paths_of(documents: Documents) -> list[list[int]]:
    """The numbers of the prefixes of each document, the root first."""
    paths = {0: []}
    for number, (_, parent) in enumerate(documents, 1):
        paths[number] = [*paths[parent], parent] if parent else []
    return [paths[number] for number in range(1, len(documents) + 1)]


def arrays_of(documents: Documents, num_tokens: int, num_levels: int) -> dict[str, np.ndarray]:
    """positions, segment_ids and prefix_ids of the sequence, int32 [T] and [T, levels]."""
    lengths, paths = [length for length, _ in documents], paths_of(documents)
    rows = [
        (sum(lengths[x - 1] for x in path) + i, number, *path, *[0] * (num_levels - len(path)))
        for number, (length, path) in enumerate(zip(lengths, paths), 1)
        for i in range(length)
    ]
    rows = np.pad(np.array(rows, np.int32), [(0, num_tokens - len(rows)), (0, 0)])
    return dict(positions=rows[:, 0], segment_ids=rows[:, 1], prefix_ids=rows[:, 2:])


def separate_rows(documents: Documents) -> list[np.ndarray]:
    """For each document, the places of the tokens of its prefixes and of its own."""
    ends = np.cumsum([length for length, _ in documents])
    own = [np.arange(end - length, end) for end, (length, _) in zip(ends, documents)]
    return [
        np.concatenate([*(own[x - 1] for x in path), own[number]])
        for number, path in enumerate(paths_of(documents))
    ]
