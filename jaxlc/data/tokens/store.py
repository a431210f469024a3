"""The token store: a corpus that is tokenized once and then memory-mapped.

It consists of these files:

    KEY.tokens.npy      the tokens of every document, each document followed by its end-of-document token
    KEY.index.npz       document offsets, split hashes, answers of chats, what was noticed, such as bad records, and a
                        fingerprint of the content
    KEY.skipped.txt     the errors of bad records that are skipped, one line each: FILE:NUMBER: reason

Making it takes memory for two batches of text with their tokens, and 24 bytes per document.

Tokenizes a large corpus in shards, by several processes.

A shard is a run of small files, or a range of the lines of a large .jsonl file; a process writes
its tokens to a store of its own. A file that is large and cannot be cut is a shard as well, which
the process that writes the store of the corpus tokenizes itself, with all cores. A process that is
killed leaves the complete shards, and the next one continues with the others.

The cache of tokenized corpora, data.cache_dir: each is tokenized once, by one of the processes that
share the cache.

The key of a token store is a hash of the source files, the tokenizer and the settings.
"""

import contextlib
import faulthandler
import functools
import hashlib
import itertools
import json
import operator
import os
import shutil
import time
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxlc.config import DataConfig
from jaxlc.core import Log, Update, UserError, no_progress, processes
from jaxlc.core.files import (
    local_path,
    locked,
    read_arrays,
    replacing,
    sha256_of,
    write_errors_explained,
)
from jaxlc.data.texts.documents import BAD_RECORDS, Fields, Notes
from jaxlc.data.texts.records import LINES_SUFFIXES, BadRecord, has_suffix
from jaxlc.data.texts.sources import SourceFile, split_hash
from jaxlc.data.tokens.encoder import Encoder, Piece, TokenizedPiece, grouped, tokenized_pieces
from jaxlc.data.tokens.tokenizers import Tokenizer, tokenizer_of

_HASHED_BYTES = 16 << 20  # of tokens, at a time
_SAMPLED_DOCUMENTS = 1000  # checked when a store is opened, to detect a damaged file


class NoText(UserError):
    """No document of a corpus can be trained on: all are empty, or chats without a token in the loss."""


class StorePaths(NamedTuple):
    """The files of a store."""

    tokens: Path
    index: Path
    bad_records: Path
    shards: Path  # directory of the stores of the shards, until all of them are tokenized

    @classmethod
    def of(cls, directory: Path, key: str) -> "StorePaths":
        names = ("tokens.npy", "index.npz", "skipped.txt", "shards")
        return cls(*(directory / f"{key}.{name}" for name in names))


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Document d is `tokens[offsets[d] : offsets[d + 1]]`; its last token is the end-of-document
    token.
    """

    # [tokens of the corpus] memory-mapped, the smallest unsigned dtype for the vocabulary size
    tokens: np.ndarray
    offsets: np.ndarray  # int64 [documents + 1]
    split_hashes: np.ndarray  # float64 [documents] in [0, 1)
    # hash of document names, tokens and answers: equal on machines that hold the same corpus
    fingerprint: str
    # int64 [answers, 2]: begin and end in `tokens` of the answers of chats, in order; None: text
    # without answers
    answers: np.ndarray | None = None
    notes: Notes = field(default_factory=Notes)
    names: tuple[str, ...] = ()  # of the documents, in the store of a shard

    @property
    def num_documents(self) -> int:
        return len(self.split_hashes)

    def read(self, begin: int, end: int) -> np.ndarray:
        """`tokens[begin:end]`, read from the file: page faults of the mapping cost several times
        more in a large file, and its pages count as memory of the process.

        Raises:
          UserError: the file was truncated after it was opened.
        """
        if self._descriptor is None:
            return self.tokens[begin:end]
        num_bytes = (end - begin) * self.tokens.itemsize
        offset = self.tokens.offset + begin * self.tokens.itemsize
        data = os.pread(self._descriptor, num_bytes, offset)
        if len(data) < num_bytes:
            raise UserError(
                f"{self.tokens.filename} was truncated while it was in use: run the same command again, which tokenizes"
                " it again"
            )
        return np.frombuffer(data, self.tokens.dtype)

    @functools.cached_property
    def _descriptor(self) -> int | None:
        """The open file that `tokens` maps; None: they are an array in memory."""
        if not isinstance(self.tokens, np.memmap):
            return None
        descriptor = os.open(self.tokens.filename, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        return descriptor


def read_store(paths: StorePaths, tokenizer: Tokenizer) -> TokenStore | None:
    """Returns the store in these files, or None if they are missing or damaged."""
    try:
        index = read_arrays(paths.index)
        notes = Notes(listed_in=paths.bad_records if paths.bad_records.exists() else None)
        notes.update(json.loads(str(index["notes"])))
        fingerprint, answers = str(index["fingerprint"]), index.get("answers")
        if answers is not None:
            fingerprint = sha256_of(fingerprint + sha256_of(answers.tobytes()))
        store = TokenStore(
            tokens=np.load(paths.tokens, mmap_mode="r", allow_pickle=False),
            offsets=index["offsets"],
            split_hashes=index["split_hashes"],
            fingerprint=fingerprint,
            answers=answers,
            notes=notes,
            names=tuple(json.loads(str(index["names"]))) if "names" in index else (),
        )
        return store if _is_valid(store, tokenizer.end_of_document_id) else None
    except Exception:  # NumPy raises many types for damaged files
        return None


def _is_valid(store: TokenStore, end_id: int) -> bool:
    """Whether the arrays have the dtypes and shapes of a store, and all documents and answers are
    in its tokens. Any exception may be raised for arrays of other shapes.
    """
    tokens = store.tokens
    offsets = store.offsets
    hashes = store.split_hashes
    stride = max(1, -(-store.num_documents // _SAMPLED_DOCUMENTS))
    conditions = [
        tokens.ndim == 1 and tokens.dtype.kind == "u",
        hashes.ndim == 1 and hashes.dtype == np.float64,
        offsets.shape == (len(hashes) + 1,) and offsets.dtype == np.int64,
        offsets[0] == 0 and offsets[-1] == len(tokens),
        (np.diff(offsets) > 0).all(),
        not store.names or len(store.names) == len(hashes),
        # a machine crash can leave pages of zeros
        (tokens[offsets[:0:-stride] - 1] == end_id).all(),
    ]
    if (answers := store.answers) is not None:
        conditions += [
            answers.ndim == 2 and answers.shape[1] == 2 and answers.dtype == np.int64,
            answers.min(initial=0) >= 0 and answers.max(initial=0) <= len(tokens),
        ]
    return all(conditions)


def write_store(
    paths: StorePaths,
    pieces: Iterator[TokenizedPiece],
    encoder: Encoder,
    *,
    keeps_names: bool = False,
) -> Iterator[int]:
    """Writes a store; yields the amount of text so far, in bytes.

    Args:
      pieces: the documents; `encoder.notes` has what is noticed in them at their end.
      keeps_names: the names of the documents are stored, too.
    """
    tokenizer = encoder.tokenizer
    notes = encoder.notes
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    num_tokens = ended_bytes = piece_bytes = 0
    offsets = array("q", [0])
    split_hashes = array("d")
    answers = array("q")
    names = list[str]()
    content_hash = hashlib.sha256()
    with replacing(paths.tokens) as out, replacing(paths.bad_records) as notes.out:
        _write_header(out, dtype, 0)
        for piece, ids, spans in pieces:
            if spans is not None:
                answers.frombytes((spans + num_tokens).tobytes())
            if piece.is_last:
                ids = np.append(ids, tokenizer.end_of_document_id)
            out.write(ids.astype(dtype).tobytes())
            num_tokens += len(ids)
            piece_bytes += piece.size
            if piece.is_last:
                num_bytes = (num_tokens - offsets[-1]) * dtype.itemsize
                start = f"{piece.document}\0{num_bytes}\0"
                content_hash.update(start.encode(errors="surrogateescape"))
                # The hash starts with the length, which is known only now, so the tokens are read
                # again.
                out.seek(-num_bytes, os.SEEK_END)
                while block := out.read(_HASHED_BYTES):
                    content_hash.update(block)
                offsets.append(num_tokens)
                split_hashes.append(split_hash(piece.document))
                if keeps_names:
                    names.append(piece.document)
                ended_bytes += piece.num_bytes
                piece_bytes = 0
            yield ended_bytes + piece_bytes
        _write_header(out, dtype, num_tokens)
    if BAD_RECORDS not in notes.counts:
        paths.bad_records.unlink()
    optional = {"names": json.dumps(names)} if keeps_names else {}
    if answers:
        optional["answers"] = np.array(answers).reshape(-1, 2)
    with replacing(paths.index) as out:
        np.savez(
            out,
            offsets=np.array(offsets),
            split_hashes=np.array(split_hashes),
            fingerprint=content_hash.hexdigest(),
            notes=json.dumps(notes.counts),
            **optional,
        )


def _write_header(out: BinaryIO, dtype: np.dtype, num_tokens: int) -> None:
    """Writes the .npy header at the start of `out`. Its size is fixed, so that it can be rewritten
    with the length.
    """
    out.seek(0)
    header = dict(
        descr=np.lib.format.dtype_to_descr(dtype), fortran_order=False, shape=(num_tokens,)
    )
    np.lib.format.write_array_header_1_0(out, header)


# a smaller corpus is tokenized by the threads of one process, which starts sooner
MIN_BYTES = 64 << 20
_SHARD_BYTES = 32 << 20
_MAX_SHARD_BYTES = 128 << 20
_SECONDS_BETWEEN_COUNTS = 1.0
_MAX_BATCH_SECONDS = 600.0


def plan_shards(
    files: Sequence[SourceFile], shard_bytes: int, max_shard_bytes: int
) -> list[list[SourceFile]]:
    """Cuts files into shards of about `shard_bytes`, in order. Files above `max_shard_bytes` that
    cannot be cut are shards of their own."""
    shards: list[list[SourceFile]] = []
    for is_large, run in itertools.groupby(files, lambda x: x.size_bytes > max_shard_bytes):
        if not is_large:
            shards += grouped(run, operator.attrgetter("size_bytes"), shard_bytes)
            continue
        for file in run:
            parts = [file]
            if has_suffix(file.path, LINES_SUFFIXES):
                parts = [
                    file._replace(lines=span, size_bytes=span[1] - span[0])
                    for span in _line_spans(file.path, shard_bytes)
                ]
            shards += [[part] for part in parts]
    return shards


def _size_of(files: Iterable[SourceFile]) -> int:
    return sum(file.size_bytes for file in files)


def _line_spans(path: Path, shard_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields ranges of whole lines: begin and end in bytes, and the number of the first line, from
    1.
    """
    begin = 0
    number = 1
    with open(path, "rb") as lines:
        while block := lines.read(shard_bytes):
            block += lines.readline()
            yield begin, begin + len(block), number
            begin += len(block)
            number += block.count(b"\n")


def sharded_pieces(
    directory: Path,
    files: Sequence[SourceFile],
    fields: Fields,
    encoder: Encoder,
    config: DataConfig,
    log: Log,
    progress: Update,
) -> Iterator[TokenizedPiece]:
    """Yields the documents of all files in order, as `tokenized_pieces`; several processes tokenize
    them.

    Args:
      directory: of the stores of the shards; complete ones in it, of an earlier process, are used.
      progress: called with the bytes that are tokenized, also of shards that are not complete.
    Raises:
      UserError: as `tokenized_pieces`.
    """
    directory.mkdir(exist_ok=True)
    shards = plan_shards(files, _SHARD_BYTES, _MAX_SHARD_BYTES)
    paths = [StorePaths.of(directory, f"{number:06d}") for number in range(len(shards))]
    is_complete = [read_store(path, encoder.tokenizer) is not None for path in paths]
    if any(is_complete):
        log(f"continuing to tokenize: {sum(is_complete):,} of {len(shards):,} parts are complete")
    sizes = [_size_of(shard) for shard in shards]
    # Tokenized by this process.
    is_inline = [x[0].size_bytes > _MAX_SHARD_BYTES and not x[0].lines for x in shards]
    waiting = [n for n in range(len(shards)) if not (is_inline[n] or is_complete[n])]
    for number in waiting:
        paths[number].index.unlink(missing_ok=True)  # of a damaged store: it means complete below
    done_bytes = [size * done for size, done in zip(sizes, is_complete)]
    total_bytes = sum(sizes)
    progress(sum(done_bytes), total_bytes)
    results = processes.run(
        tokenize_shard,
        [(shards[number], paths[number], fields, config) for number in waiting],
        config.tokenizing_processes or processes.num_cores(),
        is_reused=True,
        environment={"RAYON_NUM_THREADS": "1"},  # threads of the package tokenizers
    )
    with contextlib.closing(results):
        for number, shard in enumerate(shards):
            if is_inline[number]:
                yield from tokenized_pieces(shard, fields, encoder, log)
                done_bytes[number] = sizes[number]
                continue
            while not paths[number].index.exists():
                if result := next(results, None):
                    call, value = result
                    if isinstance(value, UserError):
                        raise value
                    if isinstance(value, processes.Died):
                        raise UserError(
                            f"a process that tokenizes ended with status {value.exit_code}: {value.output[-2000:]}"
                        )
                    done_bytes[waiting[call]] = min(value, sizes[waiting[call]])
                    progress(sum(done_bytes), total_bytes)
            store = read_store(paths[number], encoder.tokenizer)
            assert store is not None, f"{paths[number].index} was just written"
            if store.notes.listed_in is not None:
                for line in store.notes.listed_in.read_text("utf-8", "replace").split("\n")[:-1]:
                    encoder.notes.skip(BadRecord(line))
            encoder.notes.update(
                {note: count for note, count in store.notes.counts.items() if note != BAD_RECORDS}
            )
            yield from _stored_pieces(store)


def _stored_pieces(store: TokenStore) -> Iterator[TokenizedPiece]:
    """The documents of the store of a shard, one piece each, without their end-of-document tokens."""
    begins = store.offsets[:-1].tolist()
    ends = (store.offsets[1:] - 1).tolist()
    for name, begin, end in zip(store.names, begins, ends, strict=True):
        answers = None
        if store.answers is not None:
            first, last = np.searchsorted(store.answers[:, 0], (begin, end))
            answers = store.answers[first:last] - begin
        yield TokenizedPiece(Piece(b"", name, is_last=True), store.read(begin, end), answers)


def tokenize_shard(
    shard: Sequence[SourceFile], paths: StorePaths, fields: Fields, config: DataConfig
) -> Iterator[int]:
    """Writes the store of a shard, in a process of its own; yields the amount of text so far about
    once a second.

    The process ends with its stacks if a batch takes too long, for instance in the loops of a chat
    template.

    Raises:
      UserError: as `tokenized_pieces`.
    """
    encoder = Encoder(tokenizer_of(config), config.chat_template, Notes(config.max_bad_records))
    pieces = tokenized_pieces(shard, fields, encoder, lambda line: None)
    faulthandler.dump_traceback_later(_MAX_BATCH_SECONDS, exit=True)
    due_seconds = time.monotonic() + _SECONDS_BETWEEN_COUNTS
    for num_bytes in write_store(paths, pieces, encoder, keeps_names=True):
        if time.monotonic() >= due_seconds:
            yield num_bytes
            faulthandler.dump_traceback_later(_MAX_BATCH_SECONDS, exit=True)
            due_seconds = time.monotonic() + _SECONDS_BETWEEN_COUNTS
    faulthandler.cancel_dump_traceback_later()
    yield _size_of(shard)


# increment it when the stored content changes; files of an older format are then ignored
_FORMAT = 4
LEFTOVER_SECONDS = 3600  # temporary files that no process has written to for this time are deleted


def open_store(
    files: Sequence[SourceFile],
    config: DataConfig,
    fields: Fields,
    tokenizer: Tokenizer,
    progress: Update = no_progress,
    log: Log = lambda line: None,
) -> TokenStore:
    """Opens the tokenized corpus of `files` from the cache; tokenizes it first if the cache has no
    valid copy.

    Files that changed since (size or modification time) make another store. Of several processes
    that share the cache, one tokenizes and the others wait for it. If it fails or is killed, the
    next one tokenizes.

    Args:
      progress: called with the bytes of text that are tokenized, and in total.
      log: prints that this process waits, and warnings.
    Raises:
      UserError: files cannot be read or contain no text, or the cache directory cannot be written.
    """
    directory = local_path(config.cache_dir)
    encoder = Encoder(tokenizer, config.chat_template, Notes(config.max_bad_records))
    described = [
        (file.name, str(file.path.resolve()), file.size_bytes, file.modified_ns) for file in files
    ]
    template = encoder.template.identity if fields.chat else ()
    identity = (_FORMAT, tokenizer.fingerprint, (*fields, template), described)
    key = sha256_of(repr(identity))[:24]
    paths = StorePaths.of(directory, key)

    # Of processes that were killed. The next one may have made the store before they are old.
    for path in directory.glob(f"{key}.*.*.*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                path.unlink()
    store = read_store(paths, tokenizer)
    if store is None:
        advice = "use a writable directory with enough space for the tokenized corpus"
        with write_errors_explained(f"data.cache_dir {config.cache_dir!r}", advice):
            directory.mkdir(parents=True, exist_ok=True)
            with locked(
                directory / f"{key}.lock.tmp",
                lambda holder: log(
                    f"waiting for {holder}, which tokenizes the same corpus to data.cache_dir {config.cache_dir!r}"
                ),
            ):
                # no other process has written it meanwhile
                if read_store(paths, tokenizer) is None:
                    _tokenize(paths, files, fields, encoder, config, progress, log)
        store = read_store(paths, tokenizer)
        assert store is not None, f"{paths.tokens} was just written"
    if not store.num_documents:
        raise NoText(f"{files[0].setting}: no text, all documents are empty; use different sources")
    num_bad_records, first = store.notes.counts.get(BAD_RECORDS, (0, ""))
    if num_bad_records > config.max_bad_records:  # it was written with a higher limit
        raise UserError(
            f"{first}; {num_bad_records:,} records cannot be used, more than"
            f" data.max_bad_records={config.max_bad_records}"
        )
    return store


def _tokenize(
    paths: StorePaths,
    files: Sequence[SourceFile],
    fields: Fields,
    encoder: Encoder,
    config: DataConfig,
    progress: Update,
    log: Log,
) -> None:
    """Writes the store of a corpus; by several processes if it is large."""
    total_bytes = _size_of(files)
    is_large = total_bytes >= MIN_BYTES
    if is_large:
        pieces = sharded_pieces(paths.shards, files, fields, encoder, config, log, progress)
    else:
        pieces = tokenized_pieces(files, fields, encoder, log)
    for num_bytes in write_store(paths, pieces, encoder):
        if not is_large:  # the processes are ahead of what is written
            # a compressed file contains more text than its size
            progress(min(num_bytes, total_bytes), total_bytes)
    progress(total_bytes, total_bytes)
    shutil.rmtree(paths.shards, ignore_errors=True)
