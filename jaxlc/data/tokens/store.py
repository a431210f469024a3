"""The token store: a corpus that is tokenized once and then memory-mapped.

It consists of these files in the cache directory. KEY is a hash of the source files, the tokenizer and the settings:

    KEY.tokens.npy      the tokens of every document, each document followed by its end-of-document token
    KEY.index.npz       document offsets, split hashes, answers of chats, counts of invalid UTF-8 and of bad records,
                        and a fingerprint of the content
    KEY.skipped.txt     the errors of bad records that are skipped, one line each: FILE:NUMBER: reason

Making it takes memory for two batches of text with their tokens, and 24 bytes per document.

Writes the tokens of a corpus to a .npy file whose length is not known before its end.
"""

import functools
import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxlc.config.data_schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.core.files import local_path, locked, read_arrays, replacing, write_errors_explained
from jaxlc.core.text import no_progress
from jaxlc.data.texts.documents import BadRecords, Fields
from jaxlc.data.texts.sources import SourceFile, split_hash
from jaxlc.data.tokens import parallel_tokenizing
from jaxlc.data.tokens.encoder import Encoder, Notes
from jaxlc.data.tokens.tokenized_pieces import Log, Reader, TokenizedPiece, tokenized_pieces
from jaxlc.data.tokens.tokenizers import Tokenizer

_MAX_KEPT_BYTES = 16 << 20  # tokens of a document in memory


class TokenWriter:
    """Writes a .npy file of tokens, and hashes the documents in it."""

    def __init__(self, out: BinaryIO, dtype: np.dtype):
        self.lengths = array("q")  # tokens of each document
        self.content_hash = hashlib.sha256()
        self.num_tokens = 0  # tokens of all documents
        self._out, self._dtype = out, dtype
        self._document_bytes = 0  # bytes of the current document
        self._kept: list[bytes] = []  # its tokens, to be hashed; empty for a long document, which is read again
        _write_header(out, dtype, 0)

    def add(self, ids: np.ndarray) -> None:
        """Adds tokens to the current document."""
        stored = ids.astype(self._dtype).tobytes()
        self._out.write(stored)
        self.num_tokens += len(ids)
        is_kept = self._document_bytes == sum(map(len, self._kept))
        self._document_bytes += len(stored)
        self._kept = [*self._kept, stored] if is_kept and self._document_bytes <= _MAX_KEPT_BYTES else []

    def end_document(self, name: str, end_id: int) -> None:
        self.add(np.array([end_id]))
        # The hash starts with the length, which is known only now.
        self.content_hash.update(f"{name}\0{self._document_bytes}\0".encode(errors="surrogateescape"))
        for stored in self._kept or self._read_document():
            self.content_hash.update(stored)
        self.lengths.append(self._document_bytes // self._dtype.itemsize)
        self._document_bytes, self._kept = 0, []

    def finish(self) -> None:
        _write_header(self._out, self._dtype, sum(self.lengths))

    def _read_document(self) -> Iterator[bytes]:
        """Reads the current document from the file; leaves the file at its end."""
        self._out.seek(-self._document_bytes, os.SEEK_END)
        while block := self._out.read(_MAX_KEPT_BYTES):
            yield block


def _write_header(out: BinaryIO, dtype: np.dtype, num_tokens: int) -> None:
    """Writes the .npy header at the start of `out`. Its size is fixed, so that it can be rewritten with the length."""
    out.seek(0)
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": (num_tokens,)})


Progress = Callable[[int, int], None]  # (bytes of text tokenized, total bytes)

_FORMAT = 2  # increment it when the stored content changes; files of an older format are then ignored
_LEFTOVER_SECONDS = 3600  # temporary files that no process has written to for this time are deleted
_SAMPLED_DOCUMENTS = 1000  # checked when a store is opened, to detect a damaged file


class _Paths(NamedTuple):
    """The files of a store."""

    tokens: Path
    index: Path
    bad_records: Path


class InvalidUtf8(NamedTuple):
    """Text that is not UTF-8, e.g. latin-1 or UTF-16. The byte tokenizer stores its bytes; others get U+FFFD."""

    num_documents: int = 0
    num_characters: int = 0  # that decoding replaces with U+FFFD
    first_document: str = ""

    def with_document(self, name: str, num_characters: int) -> "InvalidUtf8":
        if not num_characters:
            return self
        return InvalidUtf8(self.num_documents + 1, self.num_characters + num_characters, self.first_document or name)


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Document d is `tokens[offsets[d] : offsets[d + 1]]`; its last token is the end-of-document token."""

    tokens: np.ndarray  # [tokens of the corpus] memory-mapped, the smallest unsigned dtype for the vocabulary size
    offsets: np.ndarray  # int64 [documents + 1]
    split_hashes: np.ndarray  # float64 [documents] in [0, 1)
    fingerprint: str  # hash of document names and tokens: equal on machines that hold the same corpus
    invalid_utf8: InvalidUtf8 = field(default_factory=InvalidUtf8)
    # int64 [answers, 2]: begin and end in `tokens` of the answers of chats, in order; None: text without answers
    answers: np.ndarray | None = None
    num_bad_records: int = 0  # skipped
    first_bad_record: str = ""  # the error of the first one
    bad_records_file: Path | None = None  # the errors of all; None: there are none
    notes: Notes = field(default_factory=Notes)

    @property
    def num_documents(self) -> int:
        return len(self.split_hashes)

    def read(self, begin: int, end: int) -> np.ndarray:
        """`tokens[begin:end]`, read from the file: page faults of the mapping cost several times more in a large file,
        and its pages count as memory of the process."""
        if self._file is None:
            return self.tokens[begin:end]
        itemsize, offset = self.tokens.itemsize, self.tokens.offset
        data = os.pread(self._file.fileno(), (end - begin) * itemsize, offset + begin * itemsize)
        return np.frombuffer(data, self.tokens.dtype)

    @functools.cached_property
    def _file(self) -> BinaryIO | None:
        """The file that `tokens` maps; None: they are an array in memory."""
        return open(self.tokens.filename, "rb") if isinstance(self.tokens, np.memmap) else None


def open_store(
    files: Sequence[SourceFile],
    config: DataConfig,
    fields: Fields,
    tokenizer: Tokenizer,
    progress: Progress | None = None,
    log: Log | None = None,
) -> TokenStore:
    """Opens the tokenized corpus of `files` from the cache; tokenizes it first if the cache has no valid copy.

    Files that changed since (size or modification time) make another store. Of several processes that share the cache,
    one tokenizes and the others wait for it. If it fails or is killed, the next one tokenizes.

    Args:
      log: prints that this process waits, and warnings.
    Raises:
      UserError: files cannot be read or contain no text, or the cache directory cannot be written.
    """
    directory = local_path(config.cache_dir)
    reader = Reader(fields, BadRecords(config.max_bad_records), Encoder(tokenizer, config.chat_template))
    key = _cache_key(files, reader)
    paths = _Paths(*(directory / f"{key}.{name}" for name in ("tokens.npy", "index.npz", "skipped.txt")))
    log = log or (lambda line: None)

    def on_wait(holder: str) -> None:
        log(f"waiting for {holder}, which tokenizes the same corpus to data.cache_dir {config.cache_dir!r}")

    store = _read(paths, tokenizer)
    if store is None:
        advice = "use a writable directory with enough space for the tokenized corpus"
        with write_errors_explained(f"data.cache_dir {config.cache_dir!r}", advice):
            directory.mkdir(parents=True, exist_ok=True)
            with locked(directory / f"{key}.lock.tmp", on_wait):
                if _read(paths, tokenizer) is None:  # no other process has written it meanwhile
                    _delete_leftovers(directory, key)
                    parts = directory / f"{key}.parts"
                    if sum(file.size_bytes for file in files) < parallel_tokenizing.MIN_BYTES:
                        stream = tokenized_pieces(files, reader, log)
                    else:
                        stream = parallel_tokenizing.parallel_pieces(
                            parts, files, reader, config, log, progress or no_progress
                        )
                        progress = None  # the processes are ahead of what is written
                    _write(paths, files, stream, reader, progress)
                    shutil.rmtree(parts, ignore_errors=True)
        store = _read(paths, tokenizer)
        assert store is not None, f"{paths.tokens} was just written"
    if store.num_bad_records > config.max_bad_records:  # it was written with a higher limit
        raise UserError(
            f"{store.first_bad_record}; {store.num_bad_records:,} records cannot be used, more than"
            f" data.max_bad_records={config.max_bad_records}"
        )
    return store


def _cache_key(files: Sequence[SourceFile], reader: Reader) -> str:
    described = [(file.name, str(file.path.resolve()), file.size_bytes, file.modified_ns) for file in files]
    fields = reader.fields
    if fields.chat:
        read = (*fields, reader.encoder.template.identity)
    else:  # as in older versions
        read = (fields.tokens, "", ()) if fields.tokens else fields.text
    return hashlib.sha256(repr((_FORMAT, reader.tokenizer.fingerprint, read, described)).encode()).hexdigest()[:24]


def _read(paths: _Paths, tokenizer: Tokenizer) -> TokenStore | None:
    """Returns the store in these files, or None if they are missing or damaged."""
    try:
        index = read_arrays(paths.index)
        offsets, split_hashes, fingerprint = index["offsets"], index["split_hashes"], str(index["fingerprint"])
        num_documents, num_characters = index["invalid_utf8_counts"].tolist()
        invalid_utf8 = InvalidUtf8(num_documents, num_characters, str(index["first_invalid_utf8"]))
        answers = index.get("answers")
        num_bad_records = int(index["num_bad_records"])
        first_bad_record = str(index["first_bad_record"])
        notes = Notes(json.loads(str(index["notes"])) if "notes" in index else {})
        tokens = np.load(paths.tokens, mmap_mode="r", allow_pickle=False)
        is_valid = _is_valid(tokens, offsets, split_hashes, answers)
    except Exception:  # NumPy raises many types for damaged files: OSError, ValueError, TokenError...
        return None
    if not is_valid:
        return None
    stride = -(-len(split_hashes) // _SAMPLED_DOCUMENTS)
    last_tokens = tokens[offsets[:0:-stride] - 1]
    if (last_tokens != tokenizer.end_of_document_id).any():  # a machine crash can leave pages of zeros
        return None
    return TokenStore(
        tokens=tokens,
        offsets=offsets,
        split_hashes=split_hashes,
        fingerprint=fingerprint,
        invalid_utf8=invalid_utf8,
        answers=answers,
        num_bad_records=num_bad_records,
        first_bad_record=first_bad_record,
        bad_records_file=paths.bad_records if paths.bad_records.exists() else None,
        notes=notes,
    )


def _is_valid(tokens: np.ndarray, offsets: np.ndarray, split_hashes: np.ndarray, answers: np.ndarray | None) -> bool:
    """Whether the arrays have the dtypes and shapes of a store, and all documents and answers are in its tokens."""
    is_valid = tokens.ndim == 1 and tokens.dtype.kind == "u"
    is_valid &= offsets.dtype == np.int64 and offsets.shape == (len(split_hashes) + 1,) and len(split_hashes) > 0
    is_valid &= split_hashes.dtype == np.float64 and split_hashes.ndim == 1
    is_valid = is_valid and offsets[0] == 0 and offsets[-1] == len(tokens) and bool((np.diff(offsets) > 0).all())
    if answers is None or not is_valid:
        return is_valid
    is_valid = answers.dtype == np.int64 and answers.ndim == 2 and answers.shape[1] == 2
    return is_valid and bool((answers >= 0).all() and (answers <= len(tokens)).all())


def _delete_leftovers(directory: Path, key: str) -> None:
    """Deletes the temporary files of processes that were killed."""
    for path in directory.glob(f"{key}.*.*.*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                path.unlink()


def _write(
    paths: _Paths,
    files: Sequence[SourceFile],
    stream: Iterator[TokenizedPiece],
    reader: Reader,
    progress: Progress | None,
) -> None:
    tokenizer = reader.tokenizer
    total_bytes, ended_bytes, piece_bytes = sum(file.size_bytes for file in files), 0, 0
    split_hashes, invalid, answers = array("d"), InvalidUtf8(), array("q")
    bad_records = reader.bad_records
    with replacing(paths.tokens) as out, replacing(paths.bad_records) as bad_records.out:
        tokens = TokenWriter(out, np.min_scalar_type(tokenizer.vocab_size - 1))
        for piece, ids, spans in stream:
            if spans is not None:
                answers.frombytes((spans + tokens.num_tokens).tobytes())
            tokens.add(ids)
            piece_bytes += piece.size
            if piece.is_last:
                tokens.end_document(piece.document, tokenizer.end_of_document_id)
                split_hashes.append(split_hash(piece.document))
                invalid = invalid.with_document(piece.document, piece.counts.num_invalid)
                ended_bytes, piece_bytes = ended_bytes + piece.counts.num_bytes, 0
            if progress is not None:  # a compressed file contains more text than its size
                progress(min(ended_bytes + piece_bytes, total_bytes), total_bytes)
        if not split_hashes:
            raise UserError(f"{files[0].setting}: no text, all documents are empty; use different sources")
        tokens.finish()
    if not bad_records.num_records:
        paths.bad_records.unlink()
    with replacing(paths.index) as out:
        np.savez(
            out,
            offsets=np.concatenate([[0], np.cumsum(tokens.lengths, dtype=np.int64)]),
            split_hashes=np.array(split_hashes),
            fingerprint=tokens.content_hash.hexdigest(),
            invalid_utf8_counts=np.array([invalid.num_documents, invalid.num_characters]),
            first_invalid_utf8=invalid.first_document.encode(errors="replace").decode(),
            num_bad_records=bad_records.num_records,
            first_bad_record=bad_records.first.encode(errors="replace").decode(),
            notes=json.dumps(reader.encoder.notes.counts),
            **({"answers": np.array(answers).reshape(-1, 2)} if reader.fields.chat else {}),
        )
    if progress is not None:
        progress(total_bytes, total_bytes)
