"""Mixtures: shares, schedule, selection by length, and what sequence i depends on."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxlc.config.schema import DataConfig, SourceConfig
from jaxlc.core.errors import UserError
from jaxlc.data import open_corpus
from jaxlc.data.sequences.packing import PERIOD, MixedSequences, num_copies, schedule
from tests.data.test_packing import make_store

S = 64


def write_source(path: Path, letter: str, lengths: list[int]) -> None:
    """Documents of one letter; their lengths in tokens include the end of the document."""
    path.write_text(
        "".join(json.dumps({"text": letter * (length - 1)}) + "\n" for length in lengths)
    )


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Three sources of other letters and document lengths."""
    rng = np.random.default_rng(0)
    for letter, high in (("a", 20), ("b", 100), ("c", 400)):
        write_source(tmp_path / f"{letter}.jsonl", letter, rng.integers(3, high, 300).tolist())
    sources = [
        SourceConfig(
            name=letter, paths=(str(tmp_path / f"{letter}.jsonl"),), share=share, pool=pool
        )
        for letter, share, pool in (("a", 5, "packed"), ("b", 2, "packed"), ("c", 3, "full_length"))
    ]
    return DataConfig(
        mixture=tuple(sources), seq_len=S, cache_dir=str(tmp_path / "cache"), eval_fraction=0.1
    )


def with_source(config: DataConfig, index: int, **changes) -> DataConfig:
    mixture = list(config.mixture)
    mixture[index] = dataclasses.replace(mixture[index], **changes)
    return dataclasses.replace(config, mixture=tuple(mixture))


def letters_of(sequence: dict[str, np.ndarray]) -> set[str]:
    tokens = sequence["tokens"][sequence["segment_ids"] > 0]
    return {chr(token) for token in set(tokens.tolist()) - {256}}


@pytest.mark.parametrize("counts", [(1, PERIOD - 1), (2500,) * 4, (5000, 3000, 1500, 499, 1)])
def test_schedule_has_each_share_in_every_prefix(counts):
    source_of = schedule(counts)
    before = np.cumsum(source_of == np.arange(len(counts))[:, None], axis=1)
    shares = np.arange(1, PERIOD + 1) * np.array(counts)[:, None] / PERIOD
    assert np.abs(before - shares).max() < 1 and before[:, -1].tolist() == list(counts)


def test_mixture_realized_shares_equal_those_of_sequences(config):
    corpus = open_corpus(config)
    num_sequences = 2000
    counted = dict.fromkeys("abc", 0)
    for i in range(num_sequences):
        (letter,) = letters_of(sequence := corpus.train[i])
        counted[letter] += int((sequence["segment_ids"] > 0).sum())
    shares = corpus.shares(num_sequences)
    assert {share.name: share.num_tokens for share in shares} == counted
    total = sum(counted.values())
    for share, expected in zip(shares, (0.5, 0.2, 0.3)):
        assert share.share == pytest.approx(expected)
        assert (
            abs(share.realized_share - expected) < 0.005
            and share.realized_share == counted[share.name] / total
        )
    assert shares[0].num_epochs == counted["a"] / shares[0].epoch_tokens > 5
    assert str(shares[0]).startswith("a: 50.00% of the tokens, 49.99%") and "epochs" in str(
        shares[0]
    )


def test_mixture_totals_are_sums_of_sources(config):
    """An epoch of the mixture has fewer tokens: it ends before a source repeats."""
    corpus = open_corpus(config)
    for mixed, parts in (
        (corpus.train, [source.train for source in corpus.sources]),
        (corpus.heldout, [source.heldout for source in corpus.sources]),
    ):
        assert mixed.num_documents == sum(part.num_documents for part in parts)
        assert mixed.num_tokens == sum(part.num_tokens for part in parts) > mixed.epoch_tokens
    epoch = sum(
        int((corpus.train[i]["segment_ids"] > 0).sum()) for i in range(corpus.train.num_sequences)
    )
    assert corpus.train.epoch_tokens == epoch
    assert corpus.train.num_tokens == sum(share.epoch_tokens for share in corpus.shares(10))


def test_mixture_short_run_is_within_one_sequence(config):
    train = open_corpus(config).train
    weights = [share * s.num_sequences / s.num_tokens for share, s in zip((5, 2, 3), train.sources)]
    for n in range(1, 200):
        exact = n * np.array(weights) / sum(weights)
        assert np.abs(train.num_sequences_of_first(n) - exact).max() < 1.01


def test_mixture_sequences_depend_on_sources_and_seed_only(config, tmp_path: Path):
    corpus, again = open_corpus(config), open_corpus(config)
    other_seed = open_corpus(dataclasses.replace(config, seed=1))
    assert corpus.fingerprint == again.fingerprint != other_seed.fingerprint
    for i in (0, 7, 5000, 20_003):
        for name, array in corpus.train[i].items():
            np.testing.assert_array_equal(array, again.train[i][name])
        lengths = np.bincount(corpus.train[i]["segment_ids"])[1:]
        np.testing.assert_array_equal(again.train.document_lengths(i), lengths)
    assert any(
        (corpus.train[i]["tokens"] != other_seed.train[i]["tokens"]).any() for i in range(10)
    )
    without = with_source(config, 1, share=0)
    assert [source.name for source in open_corpus(without).sources] == ["a", "c"]
    fingerprints = [
        open_corpus(changed).fingerprint
        for changed in (
            config,
            without,
            with_source(config, 0, share=6),
            with_source(config, 2, min_tokens=70),
        )
    ]
    assert len(set(fingerprints)) == 4
    # stores do not depend on shares and lengths
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 3


def test_mixture_heldout_text_is_not_trained_on(config):
    corpus = open_corpus(config)
    for source in corpus.sources:
        assert not set(source.train.document_ids) & set(source.heldout.document_ids)
    heldout = corpus.heldout
    assert isinstance(heldout, MixedSequences) and heldout.num_sequences >= 1
    counts = heldout.num_sequences_of_first(heldout.num_sequences)
    assert all(count <= source.num_sequences for count, source in zip(counts, heldout.sources))


def test_mixture_full_length_pool_has_one_document_per_sequence(config):
    train = open_corpus(config).sources[2].train
    for i in range(50):
        assert (train[i]["segment_ids"] == 1).all()


def test_mixture_chunk_tokens_limit_chunks(config):
    train = open_corpus(with_source(config, 1, chunk_tokens=10)).sources[1].train
    segments = [train[i]["segment_ids"] for i in range(train.num_sequences)]
    assert max(np.bincount(s[s > 0]).max() for s in segments) == 10
    assert train.num_tokens == open_corpus(config).sources[1].train.num_tokens


def copies(lengths: list[int], **fields) -> list[int]:
    store = make_store(lengths)
    source = SourceConfig(name="x", paths=("x",), **fields)
    return num_copies(store, np.arange(len(lengths)), source, S).tolist()


def test_selection_by_length():
    lengths = [1, 10, 63, 64, 65, 200]
    assert copies(lengths) == [1] * 6
    assert copies(lengths, min_tokens=10, max_tokens=65) == [0, 1, 1, 1, 1, 0]
    assert copies(lengths, pool="full_length") == [0, 0, 0, 1, 1, 1]
    assert copies(lengths, overlong="drop") == [1, 1, 1, 1, 0, 0]
    assert copies(lengths, length_limits=(10, 65), length_weights=(0, 1, 3)) == [0, 1, 1, 1, 3, 3]
    assert (
        sum(copies([5] * 40 + [70] * 40, length_limits=(64,), length_weights=(0.5, 2.25)))
        == 20 + 90
    )
    assert copies(lengths, min_tokens=70, length_limits=(100,), length_weights=(1, 2)) == [
        0
    ] * 5 + [2]


def test_mixture_overlong_documents_are_truncated(config):
    corpus = open_corpus(with_source(config, 2, pool="packed", overlong="truncate"))
    train = corpus.sources[2].train
    lengths = np.diff(train.store.offsets)[train.document_ids]
    assert train.num_tokens == np.minimum(lengths, S).sum() < lengths.sum()
    full = next(s for s in (train[i] for i in range(100)) if (s["segment_ids"] == 1).all())
    # its document continues, so the last token has a next one
    assert full["loss_weights"].tolist() == [1] * S


def test_mixture_source_that_selects_nothing_is_refused(config):
    with pytest.raises(
        UserError,
        match="data.mixture.a selects none of its 300 documents, the longest of 19 tokens",
    ):
        open_corpus(with_source(config, 0, min_tokens=50))
