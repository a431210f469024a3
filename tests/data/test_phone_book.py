"""The built-in source `phone-book`: documents that repeat numbers, one per sequence."""

import dataclasses
import itertools
import random
import runpy
from pathlib import Path

import numpy as np
import pytest

from jaxlc.core.errors import UserError
from jaxlc.data.corpus import open_corpus
from jaxlc.data.texts.sources import FILLERS, NAMES, phone_book_documents, retrieval_prompt
from tests.data.corpora import make_config

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "configs" / "retrieval_tokenizer.json"


def entries_of(words: list[str]) -> list[tuple[int, str, tuple[str, ...]]]:
    """(index, name, number) of the complete entries."""
    return [
        (index, word, tuple(words[index + 1 : index + 4]))
        for index, word in enumerate(words[:-3])
        if word in NAMES
    ]


def test_phone_book_documents_repeat_numbers_of_names():
    documents = list(itertools.islice(phone_book_documents(4096), 4))
    assert documents == list(itertools.islice(phone_book_documents(4096), 4))
    assert len({tuple(words) for words in documents}) == 4
    for words in documents:
        assert len(words) == 4096
        facts = [(name, number) for _, name, number in entries_of(words)]
        assert len(set(facts)) == len({name for name, _ in facts}) < len(facts)
        assert len(NAMES) - 10 < len(set(facts)) <= len(NAMES)


def test_short_documents_have_one_name_to_a_few():
    documents = itertools.islice(phone_book_documents(128), 200)
    counts = [len({name for _, name, _ in entries_of(words)}) for words in documents]
    assert min(counts) == 1 and max(counts) == 128 // 16


def test_repeated_numbers_increase_beyond_1000_tokens():
    repeated = np.zeros((4, 2))  # by quarter of the document: entries, repeated entries
    for words in itertools.islice(phone_book_documents(4096), 40):
        seen = set()
        for index, name, _ in entries_of(words):
            repeated[index // 1024] += 1, name in seen
            seen.add(name)
    fractions = repeated[:, 1] / repeated[:, 0]
    assert (np.diff(fractions) > 0).all() and fractions[0] < 0.7 and fractions[-1] > 0.97, fractions


@pytest.mark.parametrize("distance", [100, 1500, 3900])
def test_retrieval_prompt_has_one_entry_at_the_distance(distance):
    prompt, number = retrieval_prompt(random.Random(3), 4000, distance)
    *words, asked = prompt.split()
    ((index, _, stated),) = [entry for entry in entries_of(words) if entry[1] == asked]
    assert len(words) == 3999 and " ".join(stated) == number
    assert distance <= 3999 - index < distance + 20


def test_phone_book_source_gives_one_document_per_sequence(tmp_path):
    config = make_config(tmp_path, sources=("phone-book",), tokenizer=str(TOKENIZER))
    config = dataclasses.replace(config, seq_len=4096)
    corpora = [open_corpus(config) for _ in range(2)]
    cached = list((tmp_path / "cache").glob("phone-book-*"))
    assert len(cached) == 1 and cached[0].suffix == ".jsonl"
    assert corpora[0].fingerprint == corpora[1].fingerprint
    sequence = corpora[0].train[3]
    assert (sequence["positions"] == np.arange(4096)).all() and (sequence["segment_ids"] == 1).all()
    assert corpora[0].train.num_documents + corpora[0].heldout.num_documents == 1024


def test_phone_book_source_without_a_writable_cache_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"cannot write to data.cache_dir .*file.*use a writable directory"
    ):
        open_corpus(
            make_config(tmp_path, sources=("phone-book",), cache_dir=str(tmp_path / "file"))
        )


def test_tokenizer_of_retrieval_is_current(tmp_path):
    runpy.run_path(str(ROOT / "scripts" / "retrieval_tokenizer.py"))["main"](
        tmp_path / "tokenizer.json"
    )
    assert (tmp_path / "tokenizer.json").read_text() == TOKENIZER.read_text()
    assert len(set(NAMES)) == len(NAMES) and not set(NAMES) & set(FILLERS)
