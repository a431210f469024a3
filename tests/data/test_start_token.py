"""The token that documents and prompts start with: data.start_token."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from jaxlc.checkpoints.files import digest_of, read_meta
from jaxlc.config import load, load_stages
from jaxlc.config.schema import DataConfig, SourceConfig
from jaxlc.core.errors import UserError
from jaxlc.data import open_corpus
from jaxlc.data.texts.records import Record
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import load_tokenizer, starting_with
from jaxlc.generation.generate_text import PromptEncoder
from jaxlc.posttrain.records import TraceReader
from jaxlc.train.reports.run_report import start_token_lines
from jaxlc.train.stage_setup import with_stored_start
from tests.data.chat_styles import CHATML, HEADERS, SPECIAL_TOKENS, VARIABLES, write_tokenizer
from tests.generation.test_prompts import add_bos_processor
from tests.train.runs import write_untrained_run

START, END = (SPECIAL_TOKENS.index(VARIABLES[name]) for name in ("bos_token", "eos_token"))
TEXTS = [f"text {i} " * (i % 5 + 1) for i in range(30)]
AUTO = "auto"


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory) -> Path:
    """A tokenizer that puts <s> before a text in transformers, with a template that writes it."""
    directory = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), HEADERS)
    add_bos_processor(directory)
    return directory


def tokenizer_with(directory: Path, start_token: str):
    return load_tokenizer(str(directory), end_token="</s>", start_token=start_token)


def test_start_token_is_that_of_the_setting_or_of_the_tokenizer(tokenizer_directory):
    ids = {
        x: tokenizer_with(tokenizer_directory, x).start_ids.tolist()
        for x in (AUTO, "", "<s>", "<|eot_id|>")
    }
    assert ids == {
        AUTO: [START],
        "": [],
        "<s>": [START],
        "<|eot_id|>": [SPECIAL_TOKENS.index("<|eot_id|>")],
    }
    with pytest.raises(UserError, match=r"invalid value '<z>' for config.data.start_token"):
        tokenizer_with(tokenizer_directory, "<z>")
    assert (
        load_tokenizer("bytes").start_ids.size
        == load_tokenizer("bytes", start_token="").start_ids.size
        == 0
    )
    with pytest.raises(
        UserError, match=r"config.data.start_token='<s>' is for Hugging Face tokenizers"
    ):
        load_tokenizer("bytes", start_token="<s>")


def test_fingerprint_has_the_start_token_and_is_unchanged_without_it(tokenizer_directory):
    none, auto, named = (
        tokenizer_with(tokenizer_directory, x).fingerprint for x in ("", AUTO, "<s>")
    )
    content = (tokenizer_directory / "tokenizer.json").read_bytes()
    assert none == hashlib.sha256(content).hexdigest() != auto == named
    assert load_tokenizer("bytes").fingerprint == "bytes"


def corpus_of(directory: Path, tokenizer: Path, **settings):
    fields = {
        name: settings.pop(name) for name in ("token_field", "chat_field") if name in settings
    }
    if not (directory / "a.jsonl").exists():
        encoder = tokenizer_with(tokenizer, "")
        ids = [encoder.encode(text.encode()).tolist() for text in TEXTS]
        records = [dict(text=text, ids=[START] * (i % 2) + ids[i]) for i, text in enumerate(TEXTS)]
        (directory / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = SourceConfig(name="x", paths=(str(directory / "a.jsonl"),), **fields)
    return open_corpus(
        DataConfig(
            mixture=(source,), tokenizer=str(tokenizer), end_token="</s>", seq_len=48, eval_fraction=0.2,
            cache_dir=str(directory / "cache"), **settings,
        )
    )  # fmt: skip


@pytest.mark.parametrize("fields", [{}, dict(token_field="ids")], ids=str)
def test_each_packed_document_starts_with_it_once(tokenizer_directory, tmp_path, fields):
    train = corpus_of(tmp_path, tokenizer_directory, **fields).train
    (store,) = (
        source.train.store for source in corpus_of(tmp_path, tokenizer_directory, **fields).sources
    )
    documents = [store.tokens[a:b].tolist() for a, b in zip(store.offsets, store.offsets[1:])]
    plain = tokenizer_with(tokenizer_directory, "")
    assert documents == [[START, *plain.encode(text.encode()).tolist(), END] for text in TEXTS]
    for index in range(train.num_sequences):
        row = train[index]
        used = row["segment_ids"] > 0
        starts = np.flatnonzero(used & (row["positions"] == 0))
        assert len(starts) == row["segment_ids"].max()
        assert row["tokens"][starts].tolist() == [START] * len(starts)
        assert (row["tokens"][used] == START).sum() == len(starts)
        assert (row["loss_weights"][starts] == 1).all()
        assert START not in row["targets"][row["loss_weights"] > 0]
        ends = row["tokens"] == END
        assert (row["loss_weights"][ends] == 0).all() and row[
            "loss_weights"
        ].sum() == used.sum() - ends.sum()


def test_store_without_it_is_another_one_and_stays(tokenizer_directory, tmp_path):
    without, with_token = (
        corpus_of(tmp_path, tokenizer_directory, start_token=x) for x in ("", AUTO)
    )
    stores = sorted((tmp_path / "cache").glob("*.tokens.npy"))
    times = [path.stat().st_mtime_ns for path in stores]
    assert len(stores) == 2 and without.fingerprint != with_token.fingerprint
    assert (
        corpus_of(tmp_path, tokenizer_directory, start_token="").fingerprint == without.fingerprint
    )
    assert [
        path.stat().st_mtime_ns for path in sorted((tmp_path / "cache").glob("*.tokens.npy"))
    ] == times


CHAT = [dict(role="user", content="a b"), dict(role="assistant", content="c")]


TRACES = dict(
    text=("", dict(prompt="a b", completion=" c"), 1, 0),
    empty_prompt=("", dict(prompt="", completion="c"), 1, 1),  # its first token is predicted now
    sampled=("", dict(prompt="a b", completion=" c", old_log_probs=[-1.0, -1.0]), 1, 0),
    pair=("", dict(prompt="a b", chosen=" c", rejected=" d"), 1, 0),
    template_with_token=("", dict(messages=CHAT), 1, 0),
    template_without_token=(CHATML, dict(messages=CHAT), 0, 0),
    ids=("", dict(tokens=[7, 8], loss_mask=[0, 1]), 0, 0),
)


@pytest.mark.parametrize("name", TRACES)
def test_traces_start_with_it_outside_the_loss(tokenizer_directory, name):
    template, record, count, num_more = TRACES[name]

    def traces(start_token: str):
        encoder = Encoder(tokenizer_with(tokenizer_directory, start_token), template)
        return TraceReader(encoder, 400).read(Record("a:1", 1, record))

    for trace, without in zip(traces(AUTO), traces(""), strict=True):
        assert trace.tokens[:2].tolist().count(START) == count and not trace.in_loss[0]
        assert trace.tokens[-len(without.tokens) :].tolist() == without.tokens.tolist()
        assert (
            len(trace.in_loss) == len(trace.tokens)
            and trace.in_loss.sum() == without.in_loss.sum() + num_more
        )


def test_prompts_of_rollouts_and_generation_start_as_documents(tokenizer_directory):
    for setting in (AUTO, "", "<|eot_id|>"):
        tokenizer = tokenizer_with(tokenizer_directory, setting)
        reader, encode = TraceReader(Encoder(tokenizer), 400), PromptEncoder(tokenizer=tokenizer)
        expected = [*tokenizer.start_ids.tolist(), *tokenizer.encode(b"a b").tolist()]
        assert (
            reader.prompt(Record("a:1", 1, dict(prompt="a b")))[0].tolist()
            == encode("a b").tolist()
            == expected
        )
        assert reader.prompt(Record("a:1", 1, dict(prompt=[7, 8])))[0].tolist() == [7, 8]
        assert reader.prompt(Record("a:1", 1, dict(prompt=CHAT[:1])))[0].tolist().count(START) == 1


@pytest.mark.parametrize("start_token", ["", "<s>", "<|eot_id|>"])
@pytest.mark.parametrize("has_processor", [False, True])
def test_exported_tokenizer_starts_texts_as_the_run(tmp_path, start_token, has_processor):
    directory = write_tokenizer(tmp_path)
    if has_processor:
        add_bos_processor(directory)
    path = directory / "tokenizer.json"
    start_ids = [SPECIAL_TOKENS.index(start_token)] if start_token else []
    path.write_text(json.dumps(starting_with(np.array(start_ids), json.loads(path.read_text()))))
    ids = load_tokenizer(str(directory), end_token="</s>", start_token="").encode(b"a b").tolist()
    for texts, segments in ((("a b",), 1), (("a b", "a b"), 2)):
        assert Tokenizer.from_file(str(path)).encode(*texts).ids == [*start_ids, *ids * segments]
    assert load_tokenizer(str(directory), end_token="</s>").start_ids.tolist() == start_ids


def test_start_report_names_it(tokenizer_directory):
    lines = {x: start_token_lines(tokenizer_with(tokenizer_directory, x)) for x in (AUTO, "")}
    assert (
        "<s> before each document" in lines[AUTO][0]
        and "no token" in lines[""][0]
        and "<s>" in lines[""][0]
    )
    assert start_token_lines(load_tokenizer("bytes")) == []


def test_run_whose_texts_have_no_start_token_resumes_without_it(tmp_path):
    run = write_untrained_run(tmp_path / "run")
    stages = load_stages(ConfigDict(dict(model=dict(preset="tiny"))))
    assert with_stored_start(stages, run)[0].config.data.start_token == AUTO
    assert with_stored_start(stages, tmp_path / "new") == stages
    path = run / "checkpoints" / "1" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta.pop("sha256")
    meta["config"]["data"]["start_token"] = ""
    path.write_text(json.dumps(meta | dict(sha256=digest_of(meta))))
    assert read_meta(run / "checkpoints", 1)["config"]["data"]["start_token"] == ""
    assert with_stored_start(stages, run)[0].config.data.start_token == ""
    # A run that starts from it continues so, too.
    config = load(ConfigDict(dict(model=dict(init_from=str(run)))))
    assert config.data.start_token == "" and config.data.tokenizer == "bytes"
    asked = [
        dataclasses.replace(stages[0], config=load(ConfigDict(dict(data=dict(start_token="<s>")))))
    ]
    with pytest.raises(
        UserError, match=r"config.data.start_token='<s>' contradicts '' of the checkpoints"
    ):
        with_stored_start(asked, run)
