from pathlib import Path

import pytest

from jaxlc.config import defaults, load
from jaxlc.core.errors import UserError
from jaxlc.data import data_sources, open_corpus
from tests.data.corpora import S, make_config


def test_corpus_split_is_by_document_and_stable(tmp_path: Path):
    corpus = open_corpus(make_config(tmp_path))
    train, heldout = set(corpus.train.document_ids), set(corpus.heldout.document_ids)
    assert not train & heldout and len(train | heldout) == 40 and 3 <= len(heldout) <= 20
    (tmp_path / "docs" / "new.txt").write_text("an added document does not move the others")
    names = sorted(path.name for path in (tmp_path / "docs").iterdir())
    grown = open_corpus(make_config(tmp_path))
    old_ids = [d for d, name in enumerate(names) if name != "new.txt"]
    assert [old_ids.index(d) for d in grown.heldout.document_ids if d in old_ids] == sorted(heldout)


def test_corpus_heldout_does_not_depend_on_seed(tmp_path: Path):
    one, two = (open_corpus(make_config(tmp_path, seed=seed)) for seed in (1, 2))
    assert (one.heldout[0]["tokens"] == two.heldout[one.heldout.num_sequences]["tokens"]).all()
    assert any((one.train[i]["tokens"] != two.train[i]["tokens"]).any() for i in range(3))


def test_corpus_fingerprint_changes_with_sequences(tmp_path: Path):
    configs = [{}, {"seed": 1}, {"seq_len": 32}, {"eval_fraction": 0.3}, {"prefetch_steps": 9}]
    fingerprints = [
        open_corpus(make_config(tmp_path, **changes)).fingerprint for changes in configs
    ]
    assert len(set(fingerprints)) == 4 and fingerprints[0] == fingerprints[4]


def test_corpus_fingerprint_equals_earlier_version(tmp_path: Path):
    """Checkpoints store it: a change would report other data for every run that is resumed."""
    fingerprint = open_corpus(make_config(tmp_path)).fingerprint
    assert fingerprint == "168e1d23680e1d10c17de2fea2b38fb9bd9cdf1b28fa4d3134422b739800b24a"


def test_corpus_sizes_cover_all_documents(tmp_path: Path):
    corpus = open_corpus(make_config(tmp_path))
    assert corpus.train.num_documents + corpus.heldout.num_documents == 40
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "docs").iterdir())
    # and 40 end-of-document tokens
    assert corpus.train.num_tokens + corpus.heldout.num_tokens == num_bytes + 40
    assert corpus.warnings == ()


def test_corpus_single_file_can_be_trained_on(tmp_path: Path):
    (tmp_path / "big.txt").write_bytes(b"one large document " * 500 + b"\xff")
    corpus = open_corpus(make_config(tmp_path, sources=(str(tmp_path / "big.txt"),) * 2))
    assert (corpus.train.num_tokens, corpus.heldout.num_tokens) == (7126, 2376)
    assert corpus.heldout.num_sequences == 99
    assert corpus.warnings == (
        "data.sources: duplicate files: 1; each file is used once per epoch",
        "data.sources: documents that are not valid UTF-8: 1 of 1 (invalid characters: 1, first in 'big.txt');"
        " convert them to UTF-8",
        "data.sources: too few documents (1) for a split by document: the last 2,376 tokens of the longest document are"
        " held out",
    )


def test_corpus_eval_sources_are_held_out(tmp_path: Path):
    """A file that is in both is not trained on."""
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "a.txt").write_text("held-out text")
    in_both = tmp_path / "docs" / "7.txt"
    plain = open_corpus(make_config(tmp_path))
    corpus = open_corpus(make_config(tmp_path, eval_sources=(str(tmp_path / "held"), str(in_both))))
    assert (corpus.train.num_documents, corpus.heldout.num_documents) == (39, 2)
    assert corpus.heldout.num_tokens == len("held-out text") + in_both.stat().st_size + 2
    assert corpus.warnings == (
        "data.sources: files that are also in data.eval_sources: 1; they are not trained on",
    )
    assert corpus.fingerprint != plain.fingerprint
    other_fraction = make_config(
        tmp_path, eval_sources=(str(tmp_path / "held"), str(in_both)), eval_fraction=0.5
    )
    assert open_corpus(other_fraction).fingerprint == corpus.fingerprint


def test_run_without_evaluation_trains_on_every_document(tmp_path: Path):
    """Also on one document that is too short to hold out its tail, and on every group of traces."""
    (tmp_path / "one.txt").write_text("a" * S)
    traces = tmp_path / "traces.jsonl"
    traces.write_text("".join(f'{{"prompt": "{i}", "completion": "a"}}\n' for i in range(40)))
    config = defaults()
    config.model.vocab_size, config.train.eval_sequences = 257, 0
    config.data.update(seq_len=S, cache_dir=str(tmp_path / "cache"), eval_fraction=0.25)
    make_config(tmp_path)
    for num_documents, sources, traced in (
        (40, tmp_path / "docs", ""),
        (1, tmp_path / "one.txt", ""),
        (40, "", traces),
    ):
        config.data.update(sources=str(sources), traces=str(traced))
        source = data_sources.open(load(config))
        count = len(source.train.traces) if traced else source.train.num_documents
        assert (count, source.heldout) == (num_documents, None)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"eval_sources": ("{}/docs",)},
            "all files of data.sources are in data.eval_sources: add files",
        ),
        ({"eval_sources": ("{}/nothing",)}, "data.eval_sources: '.*/nothing' does not exist"),
        ({"end_token": "</s>"}, "config.data.end_token='</s>' is for Hugging Face tokenizers"),
    ],
)
def test_corpus_that_cannot_work_is_refused_early(
    tmp_path: Path, changes, message: str, monkeypatch
):
    if "eval_sources" in changes:
        changes = {
            "eval_sources": tuple(source.format(tmp_path) for source in changes["eval_sources"])
        }
    config = make_config(tmp_path, **changes)
    # it is refused before anything is tokenized
    monkeypatch.setattr("jaxlc.data.corpus.open_store", None)
    with pytest.raises(UserError, match=message):
        open_corpus(config)


def test_corpus_shorter_than_a_sequence_is_refused(tmp_path: Path):
    """Its files are large enough, but a part of it is held out."""
    with pytest.raises(
        UserError, match="data.sources: 1,[0-9]{3} tokens to train on, less than one sequence"
    ):
        open_corpus(make_config(tmp_path, seq_len=1800))
    open_corpus(make_config(tmp_path, seq_len=900))  # as the error advises
    (tmp_path / "empty.txt").touch()
    empty = make_config(tmp_path, eval_sources=(str(tmp_path / "empty.txt"),))
    with pytest.raises(UserError, match="data.eval_sources: no text, all documents are empty"):
        open_corpus(empty)
