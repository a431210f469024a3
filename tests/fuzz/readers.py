"""The readers of files that others have written, each with a valid input and how it is read."""

import functools
import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlc.checkpoints.files import read_meta
from jaxlc.config import defaults, load
from jaxlc.config.models.pretrained import locate
from jaxlc.core.errors import UserError
from jaxlc.core.files import read_json_lines
from jaxlc.data.texts.documents import BAD_RECORDS, Chat, Fields, Notes, read_documents
from jaxlc.data.texts.records import BadRecord
from jaxlc.data.texts.sources import list_files
from jaxlc.data.tokens.chat_templates import load_chat_template
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import ByteTokenizer, load_tokenizer
from jaxlc.evals.predictions import read_scores
from jaxlc.hf.files import DTYPES, TensorFiles
from jaxlc.posttrain.records import TraceReader
from jaxlc.posttrain.traces import records_of
from jaxlc.simulate import roofline
from jaxlc.train.reports.metrics import read_rows
from tests.fuzz import stored_files

CONFIG_JSON = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=64, hidden_size=16, intermediate_size=32,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=128,
    rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=False, hidden_act="silu", attention_bias=False,
    rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
)  # fmt: skip
_CHAT = [dict(role="user", content="a"), dict(role="assistant", content="b")]
_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"


class Reader(NamedTuple):
    """A reader and a directory that it reads."""

    files: Callable[[], dict[str, bytes]]  # name -> content of the valid files
    changed: str  # name of the file that is changed; "": that of the arrays of the checkpoint
    read: Callable[[Path], object]  # reads the directory; raises UserError for what it cannot read
    is_json: bool = False
    share: float = 1.0  # of the number of cases, for slow readers

    @property
    def changed_file(self) -> str:
        return self.changed or stored_files.array_file()

    def write(self, directory: Path, changed: bytes | None = None) -> None:
        """Writes the valid files, or with the one that is changed."""
        for name, content in self.files().items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                changed if changed is not None and name == self.changed_file else content
            )


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    header, data = {}, b""
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = dict(dtype="F32", shape=array.shape, data_offsets=offsets)
        data += array.tobytes()
    text = _json(header)
    return struct.pack("<Q", len(text)) + text + data


def _weights() -> dict[str, bytes]:
    arrays = {name: np.ones((4, 4), np.float32) for name in "ab"}
    index = dict(weight_map=dict(a="model-1.safetensors", b="model-2.safetensors"))
    parts = {file: _safetensors({name: arrays[name]}) for name, file in index["weight_map"].items()}
    return {"model.safetensors.index.json": _json(index), **parts}


def _header() -> dict[str, bytes]:
    first = dict(dtype="F32", shape=[2, 2], data_offsets=[0, 16])
    second = dict(dtype="F32", shape=[1], data_offsets=[16, 20])
    return {"header.json": _json(dict(a=first, b=second))}


def _read_header(directory: Path) -> None:
    header = (directory / "header.json").read_bytes()
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(20)
    )
    _read_weights(directory)


def _read_weights(directory: Path) -> None:
    (directory / "config.json").write_text("{}")  # says how weights are quantized: not at all
    files = TensorFiles(directory)
    for name, tensor in files.tensors.items():
        if tensor.path.resolve().parent != directory.resolve():
            raise AssertionError(f"{tensor.path} is outside")
        if tensor.dtype in DTYPES:
            files.read(name)


def _read_model(directory: Path) -> None:
    config = defaults()
    config.model.init_from = str(directory)
    load(config)
    locate(str(directory)).model_settings()


@functools.cache
def _tokenizer() -> dict[str, bytes]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=80, special_tokens=["</s>"])
    tokenizer.train_from_iterator(["a b c ab abc", "the cat sat"], trainer)
    config = dict(eos_token="</s>", bos_token=None, chat_template=_TEMPLATE)
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": _json(config)}


def _read_tokenizer(directory: Path) -> None:
    tokenizer = load_tokenizer(str(directory / "tokenizer.json"), end_token="</s>")
    tokenizer.decode(tokenizer.encode(b"the cat"))
    template = load_chat_template("", directory / "tokenizer.json")
    template.render(Chat(_CHAT), "chat")
    template.prompt(Chat(_CHAT[:1]))


def _read_documents(directory: Path, **fields: str) -> None:
    files, _ = list_files([str(directory)])
    notes = Notes(max_bad_records=10**6)
    for file in files:
        for document in read_documents(file, Fields(**fields), notes):
            assert b"".join(document.blocks) is not None
    _raise(notes)


def _raise(notes: Notes) -> None:
    if BAD_RECORDS in notes.counts:
        raise UserError(notes.counts[BAD_RECORDS][1])


def _lines() -> bytes:
    return b"".join(_json(dict(text=f"text {i}", number=i)) + b"\n" for i in range(8))


def _zstd() -> bytes:
    import pyarrow

    return pyarrow.compress(_lines(), "zstd", asbytes=True)


def _table(suffix: str) -> bytes:
    import pyarrow
    import pyarrow.parquet

    tokens = [[1, 2], [3]] * 4
    table = pyarrow.table(
        dict(text=[f"text {i}" for i in range(8)], number=list(range(8)), tokens=tokens)
    )
    out = pyarrow.BufferOutputStream()
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, out)
    else:
        make = pyarrow.ipc.new_stream if suffix == "stream" else pyarrow.ipc.new_file
        with make(out, table.schema) as writer:
            writer.write_table(table)
    return out.getvalue().to_pybytes()


def _megatron() -> dict[str, bytes]:
    lengths, tokens = np.array([3, 4], "<i4"), np.arange(7, dtype="<i4")
    offsets, boundaries = np.array([0, 12], "<i8"), np.array([0, 1, 2], "<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(boundaries))
    index = header + lengths.tobytes() + offsets.tobytes() + boundaries.tobytes()
    return {"data.idx": index, "data.bin": tokens.tobytes()}


def _traces() -> bytes:
    rows = [
        dict(prompt="ab", completion="c", reward=1.0, group="g", log_probs=[-0.5]),
        dict(messages=_CHAT),
        dict(tokens=[1, 2, 3], loss_mask=[0, 1, 1], advantage=0.5, policy_step=3),
        dict(prompt="ab", chosen="c", rejected="d"),
    ]
    return b"".join(_json(row) + b"\n" for row in rows)


def _read_traces(directory: Path) -> None:
    reader = TraceReader(Encoder(load_tokenizer("bytes"), "chatml"), 257)
    for record in records_of(directory / "traces.jsonl"):
        for trace in reader.read(record):
            assert len(trace.tokens)


def _checkpoint_meta() -> bytes:
    from jaxlc.checkpoints.files import DIGEST, digest_of

    meta = dict(
        step=1, next_row=4, config=dict(model=dict(vocab_size=8)), stage=dict(name="", first_step=0)
    )
    return _json(meta | {DIGEST: digest_of(meta)})


def _read_chats(directory: Path) -> None:
    """With a template in this process, which does not catch the errors of its own."""
    encoder = Encoder(ByteTokenizer(), "chatml")
    notes = Notes(max_bad_records=10**6)
    for document in read_documents(
        list_files([str(directory)]).files[0], Fields(chat="messages"), notes
    ):
        assert document.chat is not None
        try:
            encoder.encode([encoder.template.render(document.chat, document.where)])
        except BadRecord as error:
            notes.skip(error)
    _raise(notes)


_CALL = dict(type="function", function=dict(name="f", arguments='{"x": 1}'))
_TOOL_CHAT = dict(
    messages=[
        *_CHAT,
        dict(role="assistant", content=None, tool_calls=[_CALL]),
        dict(role="tool", content="1"),
        *_CHAT,
    ],
    tools=[dict(type="function", function=dict(name="f"))],
)
_SCORE = dict(
    task="needle",
    haystack="",
    length=8,
    score=1.0,
    standard_error=None,
    num_examples=4,
    seconds=1.0,
)
_ROLLOUT = dict(
    prompt="ab", completion="c", reward=1.0, group="g", sampled_log_probs=[-0.5], policy_step=0
)


def _lines_of(*rows: object) -> bytes:
    return b"".join(_json(row) + b"\n" for row in rows)


def _one(
    name: str, content: Callable[[], bytes], read: Callable[[Path], object], is_json: bool = False
) -> Reader:
    return Reader(lambda: {name: content()}, name, read, is_json)


_read_tokens = functools.partial(_read_documents, tokens="tokens")
READERS = {
    "safetensors": Reader(_weights, "model-1.safetensors", _read_weights),
    "safetensors header": Reader(_header, "header.json", _read_header, is_json=True),
    "safetensors index": Reader(
        _weights, "model.safetensors.index.json", _read_weights, is_json=True
    ),
    "config.json": _one("config.json", lambda: _json(CONFIG_JSON), _read_model, is_json=True),
    "tokenizer.json": Reader(
        _tokenizer, "tokenizer.json", _read_tokenizer, is_json=True, share=0.3
    ),
    "tokenizer_config.json": Reader(
        _tokenizer, "tokenizer_config.json", _read_tokenizer, is_json=True, share=0.3
    ),
    "chat template": Reader(
        lambda: _tokenizer() | {"chat_template.jinja": _TEMPLATE.encode()},
        "chat_template.jinja",
        _read_tokenizer,
        share=0.1,
    ),
    "jsonl": _one("a.jsonl", _lines, _read_documents),
    "jsonl.gz": _one("a.jsonl.gz", lambda: gzip.compress(_lines(), mtime=0), _read_documents),
    "jsonl.zst": _one("a.jsonl.zst", _zstd, _read_documents),
    "parquet": _one("a.parquet", lambda: _table("parquet"), _read_documents),
    "parquet tokens": _one("a.parquet", lambda: _table("parquet"), _read_tokens),
    "arrow stream": _one("a.arrow", lambda: _table("stream"), _read_documents),
    "arrow file": _one("a.arrow", lambda: _table("file"), _read_tokens),
    "Megatron index": Reader(_megatron, "data.idx", _read_tokens),
    "chats": _one("a.jsonl", lambda: _json(_TOOL_CHAT), _read_chats, is_json=True),
    "traces": _one("traces.jsonl", _traces, _read_traces),
    "trace": _one("traces.jsonl", lambda: _traces().splitlines()[0], _read_traces, is_json=True),
    "rollouts": _one(
        "1.jsonl", lambda: _json(_ROLLOUT) + b"\n", stored_files.read_rollouts, is_json=True
    ),
    "token store, index": Reader(stored_files.token_store, "x.index.npz", stored_files.read_store),
    "token store, tokens": Reader(
        stored_files.token_store, "x.tokens.npy", stored_files.read_store
    ),
    "checkpoint meta": _one(
        "1/meta/metadata", _checkpoint_meta, lambda path: read_meta(path, 1), is_json=True
    ),
    "checkpoint config": _one(
        "config.json", stored_files.run_config, stored_files.read_run_config, is_json=True
    ),
    "checkpoint, tree": Reader(
        stored_files.checkpoint,
        "1/state/_METADATA",
        stored_files.read_checkpoint,
        is_json=True,
        share=0.1,
    ),
    "checkpoint, checksums": Reader(
        stored_files.checkpoint,
        "1/checksums/metadata",
        stored_files.read_checkpoint,
        is_json=True,
        share=0.1,
    ),
    "checkpoint, manifest": Reader(
        stored_files.checkpoint, "1/state/manifest.ocdbt", stored_files.read_checkpoint, share=0.1
    ),
    "checkpoint, arrays": Reader(
        stored_files.checkpoint, "", stored_files.read_checkpoint, share=0.1
    ),
    "metrics": _one(
        "metrics.jsonl",
        lambda: _lines_of(dict(step=1, loss=2.5), dict(step=2, loss=2.25)),
        lambda path: read_rows(path / "metrics.jsonl"),
    ),
    "scores": _one("scores.jsonl", lambda: _json(_SCORE), read_scores, is_json=True),
    "search results": _one(
        "rows.jsonl",
        lambda: _json(dict(key="a")) + b"\n",
        lambda path: read_json_lines(path / "rows.jsonl"),
    ),
    "constants": _one(
        "constants.json",
        lambda: _json(dict(matmul_share=0.7, attention_share=dict(cudnn=[0.6, 0.5]))),
        lambda path: roofline.from_file(str(path / "constants.json")),
        is_json=True,
    ),
    "plan": _one("plan.json", stored_files.plan, stored_files.read_plan, is_json=True),
    "profile": Reader(stored_files.profile, "a.xplane.pb", stored_files.read_profile),
    "profiled program": Reader(stored_files.profile, "step.hlo.txt.gz", stored_files.read_profile),
    "profiled run": Reader(
        stored_files.profile, "run.json", stored_files.read_profile, is_json=True
    ),
}
