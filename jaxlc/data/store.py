"""The token store: a corpus that is tokenized once and then memory-mapped.

It consists of two files in the cache directory. KEY is a hash of the source files, the tokenizer and the settings:

    KEY.tokens.npy   the tokens of every document, each document followed by its end-of-document token
    KEY.index.npz    document offsets, split hashes, counts of invalid UTF-8, and a fingerprint of the content
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxlc.config.schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.data.sources import Document, SourceFile, read_documents, split_hash
from jaxlc.data.tokenizers import Tokenizer

Progress = Callable[[int, int], None]  # (bytes of text tokenized, total bytes)

_FORMAT = 2  # increment it when the stored content changes; files of an older format are then ignored
_BATCH_BYTES = 16 << 20  # text tokenized at one time, over all threads
_SAMPLED_DOCUMENTS = 1000  # checked when a store is opened, to detect a damaged file


class InvalidUtf8(NamedTuple):
    """Text that is not UTF-8, e.g. latin-1 or UTF-16. The byte tokenizer stores its bytes; others see U+FFFD."""

    num_documents: int = 0
    num_characters: int = 0  # that decoding replaces with U+FFFD
    first_document: str = ""


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Document d is `tokens[offsets[d] : offsets[d + 1]]`; its last token is the end-of-document token."""

    tokens: np.ndarray  # [tokens of the corpus] memory-mapped, the smallest unsigned dtype for the vocabulary size
    offsets: np.ndarray  # int64 [documents + 1]
    split_hashes: np.ndarray  # float64 [documents] in [0, 1)
    fingerprint: str  # hash of document names and tokens: equal on machines that hold the same corpus
    invalid_utf8: InvalidUtf8 = field(default_factory=InvalidUtf8)

    @property
    def num_documents(self) -> int:
        return len(self.split_hashes)


def open_store(
    files: Sequence[SourceFile], config: DataConfig, tokenizer: Tokenizer, progress: Progress | None = None
) -> TokenStore:
    """Opens the tokenized corpus of `files` from the cache; tokenizes it first if the cache has no valid copy.

    Files that changed since (size or modification time) make another store. Several processes may call this at the
    same time: each writes its own temporary files and renames them, and all write the same bytes.

    Raises:
      UserError: files cannot be read or contain no text, or the cache directory cannot be written.
    """
    directory = Path(os.path.expanduser(config.cache_dir))
    key = _cache_key(files, config.text_field, tokenizer)
    tokens_path, index_path = directory / f"{key}.tokens.npy", directory / f"{key}.index.npz"
    store = _read(tokens_path, index_path, tokenizer)
    if store is None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _write(tokens_path, index_path, files, config, tokenizer, progress)
        except OSError as error:
            raise UserError(
                f"cannot write to data.cache_dir {config.cache_dir!r} ({error.strerror or error}); use a writable"
                " directory with enough space for the tokenized corpus"
            ) from error
        store = _read(tokens_path, index_path, tokenizer)
        assert store is not None, f"{tokens_path} was just written"
    return store


def _cache_key(files: Sequence[SourceFile], text_field: str, tokenizer: Tokenizer) -> str:
    described = [(file.name, str(file.path.resolve()), file.size_bytes, file.modified_ns) for file in files]
    return hashlib.sha256(repr((_FORMAT, tokenizer.fingerprint, text_field, described)).encode()).hexdigest()[:24]


def _read(tokens_path: Path, index_path: Path, tokenizer: Tokenizer) -> TokenStore | None:
    """Returns the store in these files, or None if they are missing or damaged."""
    try:
        with np.load(index_path) as index:
            offsets, split_hashes, fingerprint = index["offsets"], index["split_hashes"], str(index["fingerprint"])
            num_documents, num_characters = index["invalid_utf8_counts"].tolist()
            invalid_utf8 = InvalidUtf8(num_documents, num_characters, str(index["first_invalid_utf8"]))
        tokens = np.load(tokens_path, mmap_mode="r")
    except Exception:  # NumPy raises many types for damaged files: OSError, ValueError, BadZipFile, TokenError...
        return None
    if len(tokens) != offsets[-1] or len(offsets) != len(split_hashes) + 1:
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
    )


def _write(
    tokens_path: Path,
    index_path: Path,
    files: Sequence[SourceFile],
    config: DataConfig,
    tokenizer: Tokenizer,
    progress: Progress | None,
) -> None:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    total_bytes = sum(file.size_bytes for file in files)
    done_bytes, lengths, split_hashes, content_hash, invalid = 0, [], [], hashlib.sha256(), InvalidUtf8()
    with _replacing(tokens_path) as out:
        _write_header(out, dtype, 0)
        for document, ids in _tokenized(files, config.text_field, tokenizer):
            stored = np.append(ids, tokenizer.end_of_document_id).astype(dtype).tobytes()
            out.write(stored)
            content_hash.update(f"{document.name}\0{len(stored)}\0".encode(errors="surrogateescape"))
            content_hash.update(stored)
            lengths.append(len(ids) + 1)
            split_hashes.append(split_hash(document.name))
            invalid = _count_invalid_utf8(invalid, document)
            if progress is not None:  # a compressed file contains more text than its size
                done_bytes = min(done_bytes + len(document.text), total_bytes)
                progress(done_bytes, total_bytes)
        if not lengths:
            raise UserError(
                f"data.sources {list(config.sources)} contain no text: all documents are empty; use different sources"
            )
        _write_header(out, dtype, sum(lengths))
    with _replacing(index_path) as out:
        np.savez(
            out,
            offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
            split_hashes=np.array(split_hashes),
            fingerprint=content_hash.hexdigest(),
            invalid_utf8_counts=np.array([invalid.num_documents, invalid.num_characters]),
            first_invalid_utf8=invalid.first_document.encode(errors="replace").decode(),
        )
    if progress is not None:
        progress(total_bytes, total_bytes)


def _count_invalid_utf8(counts: InvalidUtf8, document: Document) -> InvalidUtf8:
    """Adds one document to the counts."""
    try:
        document.text.decode()
    except UnicodeDecodeError:
        replaced = document.text.decode(errors="replace").count("\ufffd")
        in_source = document.text.count("\ufffd".encode())
        return InvalidUtf8(
            counts.num_documents + 1,
            counts.num_characters + replaced - in_source,
            counts.first_document or document.name,
        )
    return counts


def _tokenized(
    files: Sequence[SourceFile], text_field: str, tokenizer: Tokenizer
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yields every document with its token IDs, in order. The documents of a batch are tokenized in parallel threads,
    one per core."""

    def tokenize(batch: list[Document]) -> Iterator[tuple[Document, np.ndarray]]:
        return zip(batch, pool.map(tokenizer.encode, [document.text for document in batch]), strict=True)

    with ThreadPoolExecutor() as pool:
        batch, batch_bytes = [], 0
        for file in files:
            for document in read_documents(file, text_field):
                batch.append(document)
                batch_bytes += len(document.text)
                if batch_bytes >= _BATCH_BYTES:
                    yield from tokenize(batch)
                    batch, batch_bytes = [], 0
        yield from tokenize(batch)


def _write_header(out: BinaryIO, dtype: np.dtype, num_tokens: int) -> None:
    """Writes the .npy header at the start of `out`. Its size is fixed, so that it can be rewritten with the length."""
    out.seek(0)
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": (num_tokens,)})


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that atomically replaces `path` at the end; it is deleted on failure."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp", delete=False) as out:
        try:
            yield out
            out.flush()
            os.fsync(out.fileno())
            os.replace(out.name, path)
        except BaseException:
            os.unlink(out.name)
            raise
