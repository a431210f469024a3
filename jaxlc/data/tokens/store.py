"""The token store: a corpus that is tokenized once and then memory-mapped.

It consists of these files:

    KEY.tokens.npy      the tokens of every document, each document followed by its end-of-document token
    KEY.index.npz       document offsets, split hashes, answers of chats, counts of invalid UTF-8 and of bad records,
                        and a fingerprint of the content
    KEY.skipped.txt     the errors of bad records that are skipped, one line each: FILE:NUMBER: reason

Making it takes memory for two batches of text with their tokens, and 24 bytes per document.
"""

import functools
import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxlc.core.files import read_arrays, replacing
from jaxlc.data.texts.documents import BAD_RECORDS, INVALID_CHARACTERS, INVALID_DOCUMENTS, Notes
from jaxlc.data.texts.sources import split_hash
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenize import TokenizedPiece
from jaxlc.data.tokens.tokenizers import Tokenizer

_MAX_KEPT_BYTES = 16 << 20  # tokens of a document in memory
_SAMPLED_DOCUMENTS = 1000  # checked when a store is opened, to detect a damaged file


class StorePaths(NamedTuple):
    """The files of a store."""

    tokens: Path
    index: Path
    bad_records: Path

    @classmethod
    def of(cls, directory: Path, key: str) -> "StorePaths":
        return cls(*(directory / f"{key}.{name}" for name in ("tokens.npy", "index.npz", "skipped.txt")))


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Document d is `tokens[offsets[d] : offsets[d + 1]]`; its last token is the end-of-document token."""

    tokens: np.ndarray  # [tokens of the corpus] memory-mapped, the smallest unsigned dtype for the vocabulary size
    offsets: np.ndarray  # int64 [documents + 1]
    split_hashes: np.ndarray  # float64 [documents] in [0, 1)
    fingerprint: str  # hash of document names and tokens: equal on machines that hold the same corpus
    # int64 [answers, 2]: begin and end in `tokens` of the answers of chats, in order; None: text without answers
    answers: np.ndarray | None = None
    notes: Notes = field(default_factory=Notes)
    names: tuple[str, ...] = ()  # of the documents, in the store of a shard

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


def read_store(paths: StorePaths, tokenizer: Tokenizer) -> TokenStore | None:
    """Returns the store in these files, or None if they are missing or damaged."""
    try:
        index = read_arrays(paths.index)
        store = TokenStore(
            tokens=np.load(paths.tokens, mmap_mode="r", allow_pickle=False),
            offsets=index["offsets"],
            split_hashes=index["split_hashes"],
            fingerprint=str(index["fingerprint"]),
            answers=index.get("answers"),
            notes=_stored_notes(index, paths),
            names=tuple(json.loads(str(index["names"]))) if "names" in index else (),
        )
        is_valid = _is_valid(store)
    except Exception:  # NumPy raises many types for damaged files: OSError, ValueError, TokenError...
        return None
    if not is_valid:
        return None
    stride = max(1, -(-store.num_documents // _SAMPLED_DOCUMENTS))
    last_tokens = store.tokens[store.offsets[:0:-stride] - 1]
    if (last_tokens != tokenizer.end_of_document_id).any():  # a machine crash can leave pages of zeros
        return None
    return store


def _stored_notes(index: dict[str, np.ndarray], paths: StorePaths) -> Notes:
    notes = Notes(listed_in=paths.bad_records if paths.bad_records.exists() else None)
    num_bad_records = int(index["num_bad_records"])
    num_documents, num_characters = index["invalid_utf8_counts"].tolist()
    first_invalid = str(index["first_invalid_utf8"])
    if num_bad_records:
        notes.add(BAD_RECORDS, str(index["first_bad_record"]), num_bad_records)
    if num_documents:
        notes.add(INVALID_DOCUMENTS, first_invalid, num_documents)
        notes.add(INVALID_CHARACTERS, first_invalid, num_characters)
    notes.update(json.loads(str(index["notes"])))
    return notes


def _is_valid(store: TokenStore) -> bool:
    """Whether the arrays have the dtypes and shapes of a store, and all documents and answers are in its tokens."""
    tokens, offsets, hashes, answers = store.tokens, store.offsets, store.split_hashes, store.answers
    is_valid = tokens.ndim == 1 and tokens.dtype.kind == "u"
    is_valid &= hashes.dtype == np.float64 and hashes.ndim == 1
    is_valid &= offsets.dtype == np.int64 and offsets.shape == (len(hashes) + 1,)
    is_valid &= not store.names or len(store.names) == len(hashes)
    is_valid = is_valid and offsets[0] == 0 and offsets[-1] == len(tokens) and bool((np.diff(offsets) > 0).all())
    if answers is None or not is_valid:
        return is_valid
    is_valid = answers.dtype == np.int64 and answers.ndim == 2 and answers.shape[1] == 2
    return is_valid and bool((answers >= 0).all() and (answers <= len(tokens)).all())


def write_store(
    paths: StorePaths,
    pieces: Iterator[TokenizedPiece],
    encoder: Encoder,
    *,
    has_answers: bool,
    keeps_names: bool = False,
) -> Iterator[int]:
    """Writes a store; yields the amount of text so far, in bytes.

    Args:
      pieces: the documents; `encoder.notes` has what is noticed in them at their end.
      keeps_names: the names of the documents are stored, too.
    """
    tokenizer, notes = encoder.tokenizer, encoder.notes
    ended_bytes = piece_bytes = 0
    split_hashes, answers, names = array("d"), array("q"), list[str]()
    with replacing(paths.tokens) as out, replacing(paths.bad_records) as notes.out:
        tokens = TokenWriter(out, np.min_scalar_type(tokenizer.vocab_size - 1))
        for piece, ids, spans in pieces:
            if spans is not None:
                answers.frombytes((spans + tokens.num_tokens).tobytes())
            tokens.add(ids)
            piece_bytes += piece.size
            if piece.is_last:
                tokens.end_document(piece.document, tokenizer.end_of_document_id)
                split_hashes.append(split_hash(piece.document))
                if keeps_names:
                    names.append(piece.document)
                ended_bytes += piece.num_bytes
                piece_bytes = 0
            yield ended_bytes + piece_bytes
        tokens.finish()
    counts = dict(notes.counts)
    num_bad_records, first_bad_record = counts.pop(BAD_RECORDS, (0, ""))
    num_documents, first_invalid = counts.pop(INVALID_DOCUMENTS, (0, ""))
    num_characters, _ = counts.pop(INVALID_CHARACTERS, (0, ""))
    if not num_bad_records:
        paths.bad_records.unlink()
    optional = {"names": json.dumps(names)} if keeps_names else {}
    if has_answers:
        optional["answers"] = np.array(answers).reshape(-1, 2)
    with replacing(paths.index) as out:
        np.savez(
            out,
            offsets=np.concatenate([[0], np.cumsum(tokens.lengths, dtype=np.int64)]),
            split_hashes=np.array(split_hashes),
            fingerprint=tokens.content_hash.hexdigest(),
            invalid_utf8_counts=np.array([num_documents, num_characters]),
            first_invalid_utf8=first_invalid.encode(errors="replace").decode(),
            num_bad_records=num_bad_records,
            first_bad_record=first_bad_record.encode(errors="replace").decode(),
            notes=json.dumps(counts),
            **optional,
        )


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
