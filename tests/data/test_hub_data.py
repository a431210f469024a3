"""Data sets of the Hugging Face hub, against a stand-in of it on loopback: its files, and what is
refused.

Another process opens them, since huggingface_hub reads its environment when it is imported.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from jaxlc.config.models.hub import Dataset
from jaxlc.core.errors import UserError
from tests import environment, helpers
from tests.hf.hub_stand_in import Hub, Repo, serving

TEXTS = [f"document {i} " * 40 for i in range(60)]
CHAT = [dict(role="user", content="ask"), dict(role="assistant", content="answer")]
CARD = """---
configs:
- config_name: plain
  data_files:
  - {split: train, path: plain/train-*}
  - {split: test, path: plain/test.parquet}
- config_name: chats
  data_files: chats/train.jsonl
---
"""
# Prints a line of JSON for each list of arguments: names of sources, then those of chats to evaluate on. Before, a line
# for the source that is streamed: its texts by sequence, its number of chunks, and its files.
SCRIPT = """
import json, sys
from jaxlc.config import defaults, load
from jaxlc.config.schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.data import data_sources, open_corpus
from jaxlc.data.texts.sources import list_files
cache, streamed, *calls = map(json.loads, sys.argv[1:])
if streamed:
    config = defaults()
    config.model.vocab_size, config.train.eval_sequences = 257, 0
    config.data.update(sources=(streamed,), stream=True, stream_cache_gib=2**-12, seq_len=1024, cache_dir=cache)
    stream = data_sources.open(load(config))
    while len(counts := stream.train.counts(10**9)) < len(stream.train.chunks):
        stream.train.at(sum(counts))
    sequences = [stream.train[i] for i in range(sum(counts))]
    texts = [stream.tokenizer.decode(x["tokens"][x["segment_ids"] == n])
             for x in sequences for n in range(1, x["segment_ids"].max() + 1)]
    print(json.dumps([texts, len(counts), list(stream.identity)]))
for sources, evaluated in calls:
    try:
        files = [(x.name, str(x.path)) for x in list_files(sources).files]
        config = DataConfig(sources=tuple(sources), eval_sources=tuple(evaluated), seq_len=512, cache_dir=cache,
                            eval_chat_format="messages" * bool(evaluated), chat_template="chatml")
        corpus = open_corpus(config)
        heldout = corpus.heldout[0]
        answers = corpus.tokenizer.decode(heldout["targets"][heldout["loss_weights"] > 0])
        print(json.dumps([files, corpus.warnings, corpus.train.num_documents, answers, corpus.fingerprint]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with the data set org/talk; private, and with accepted terms, the same as org/secret and org/gated."""
    plain = datasets.Dataset.from_list([dict(text=text) for text in TEXTS])
    files = {"README.md": CARD.encode()}
    for name, part in (("plain/train-0", range(50)), ("plain/train-1", range(50, 60))):
        plain.select(part).to_parquet(tmp_path / "file")
        files[f"{name}.parquet"] = (tmp_path / "file").read_bytes()
    plain.select(range(30)).to_parquet(tmp_path / "file")
    files["plain/test.parquet"] = (tmp_path / "file").read_bytes()
    datasets.Dataset.from_list([dict(messages=CHAT)] * 2).to_json(tmp_path / "file")
    files["chats/train.jsonl"] = (tmp_path / "file").read_bytes()
    with serving() as hub:
        for name in ("talk", "secret", "gated"):
            repo = Repo(is_private=name == "secret", is_gated=name == "gated")
            repo.commit(files)
            hub.repos[f"datasets/org/{name}"] = repo
        yield hub


def opened(
    hub: Hub,
    tmp_path: Path,
    *calls: tuple[list[str], list[str]],
    streamed: str = "",
    **more: str,
) -> list:
    home = dict(HF_HOME=str(tmp_path / "hf"), HF_ENDPOINT=hub.url)
    env = environment.for_user() | home | dict(HF_HUB_DISABLE_XET="1", JAX_PLATFORMS="cpu") | more
    arguments = [str(tmp_path / "tokens"), streamed, *calls]
    command = [sys.executable, "-c", SCRIPT, *map(json.dumps, arguments)]
    result = subprocess.run(
        command, env=env, text=True, capture_output=True, timeout=helpers.TIMEOUT_SECONDS
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


# Name -> the end of its error.
REFUSED = {
    "hub:org/talk": "add /SUBSET/SPLIT: there is more than one subset; expected one of plain, chats",
    "hub:org/talk/plian/train": "it has no subset 'plian'; expected one of plain, chats",
    "hub:org/talk/plain/dev": "it has no split 'dev'; expected one of train, test",
    "hub:org/talk@v2/plain/train": "it has no such revision: name a commit, branch or tag",
    "hub:org/none/plain/train": "no such data set for you: check the name, its terms of use, and `hf auth",
    "hub:org/secret/plain/train": "no such data set for you",
    "hub:org/gated/plain/train": "no such data set for you",
}


def test_split_is_read_after_interruptions_and_changes_streamed_or_refused_in_one_sentence(
    hub: Hub, tmp_path: Path
):
    """One test, since each start of another process takes seconds."""
    repo = hub.repos["datasets/org/talk"]
    first = repo.main
    call = [f"hub:org/talk@{first}/plain/train"], [f"hub:org/talk@{first}/chats/train"]
    branch = ["hub:org/talk/plain/test"], []
    hub.cut_bytes = 1000
    result, before = opened(hub, tmp_path, call, branch)
    files, warnings, num_documents, answers, _ = result
    assert hub.cut_bytes == 0  # a download was interrupted
    assert [name for name, _ in files] == ["plain/train-0.parquet", "plain/train-1.parquet"]
    for name, path in files:
        assert Path(path).read_bytes() == repo.commits[first][name]
    assert (num_documents, answers, warnings) == (60, "answer<|im_end|>" * 2, [])

    num_requests = len(hub.requests)
    unknown = ["hub:org/talk/plain/dev"], []
    kept, offline = opened(hub, tmp_path, call, unknown, HF_HUB_OFFLINE="1")
    assert kept == result and len(hub.requests) == num_requests
    assert "the hub cannot be reached, and its cache has no copy" in offline

    second = repo.commit({"plain/test.parquet": repo.commits[first]["plain/train-0.parquet"]})
    pinned = [f"hub:org/talk@{first}/plain/test"], []
    refused = [([name], []) for name in REFUSED]
    source = f"hub:org/talk@{second}/plain/train"
    stream, after, kept, *errors = opened(hub, tmp_path, branch, pinned, *refused, streamed=source)
    assert f"is hub:org/talk@{first} now: name this commit" in before[1][0]
    assert f"is hub:org/talk@{second} now" in after[1][0]
    assert before[4] != after[4] and before[4] == kept[4]
    for error, (name, expected) in zip(errors, REFUSED.items(), strict=True):
        assert name in error and expected in error and "\n" not in error

    # A stream has every document, and is not downloaded to the cache.
    texts, num_chunks, identity = stream
    assert sorted(texts) == sorted(TEXTS)
    paths = [f"plain/train-{i}.parquet" for i in range(2)]
    assert num_chunks == 2 and identity[:2] == [
        f"hf://datasets/org/talk@{second}/{path}" for path in paths
    ]
    downloaded = {path.name for path in (tmp_path / "hf").rglob(f"{second}/plain/*")}
    assert downloaded == {"test.parquet"}


@pytest.mark.parametrize(
    "name", ["hub:talk", "hub:org/talk/plain", "hub:org/talk@/a/b", "hub:a/b/c/d/e"]
)
def test_name_of_another_form_is_refused(name: str):
    with pytest.raises(UserError, match="expected hub:ORGANIZATION/NAME@REVISION/SUBSET/SPLIT"):
        Dataset.parse(name, "data.sources")
