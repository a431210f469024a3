"""The token store: a corpus tokenized once, then memory-mapped.

Two files in the cache directory, named by what they were made from:

    KEY.tokens.npy   every document's tokens and its end-of-document token, one document after the other
    KEY.index.npz    where documents begin, the hash that splits them, the fingerprint of the content
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxlc.config.schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.data.sources import Document, SourceFile, list_files, read_documents, split_hash
from jaxlc.data.tokenizers import Tokenizer

Progress = Callable[[int, int], None]  # (bytes of text tokenized, bytes in all)

_FORMAT = 1  # raise it when what is stored changes: old files are then left alone
_BATCH_BYTES = 16 << 20  # text tokenized at one time, over all threads
_SAMPLED_DOCUMENTS = 1000  # looked at when a store is opened, to see that it is whole


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Document d is `tokens[offsets[d] : offsets[d + 1]]`; its last token is the end-of-document token."""

    tokens: np.ndarray  # [tokens of the corpus] memory-mapped, the smallest unsigned dtype that holds the vocabulary
    offsets: np.ndarray  # int64 [documents + 1]
    split_hashes: np.ndarray  # float64 [documents] in [0, 1)
    fingerprint: str  # of the documents' names and tokens: equal on machines that hold the same corpus

    @property
    def num_documents(self) -> int:
        return len(self.split_hashes)


def open_store(config: DataConfig, tokenizer: Tokenizer, progress: Progress | None = None) -> TokenStore:
    """The tokenized corpus of `config`, from the cache if it is there and whole, else made now.

    Files changed since (size or modification time) make another store. Several processes may do this at once:
    each writes its own temporary files and renames them, and all write the same bytes.

    Raises:
      UserError: sources that cannot be read or hold no text, or a cache directory that cannot be written.
    """
    files = list_files(config)
    directory = Path(config.cache_dir).expanduser()
    key = _cache_key(files, config.text_field, tokenizer)
    tokens_path, index_path = directory / f"{key}.tokens.npy", directory / f"{key}.index.npz"
    store = _read(tokens_path, index_path, tokenizer)
    if store is None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _write(tokens_path, index_path, files, config, tokenizer, progress)
        except OSError as error:
            raise UserError(
                f"data.cache_dir {config.cache_dir!r} cannot be written ({error.strerror});"
                " set it to a directory with room for the tokenized corpus"
            ) from error
        store = _read(tokens_path, index_path, tokenizer)
        assert store is not None, f"{tokens_path} was just written"
    return store


def _cache_key(files: list[SourceFile], text_field: str, tokenizer: Tokenizer) -> str:
    described = [(file.name, str(file.path.resolve()), file.size_bytes, file.modified_ns) for file in files]
    return hashlib.sha256(repr((_FORMAT, tokenizer.fingerprint, text_field, described)).encode()).hexdigest()[:24]


def _read(tokens_path: Path, index_path: Path, tokenizer: Tokenizer) -> TokenStore | None:
    """The store in these files; None where they are missing or damaged."""
    try:
        with np.load(index_path) as index:
            offsets, split_hashes, fingerprint = index["offsets"], index["split_hashes"], str(index["fingerprint"])
        tokens = np.load(tokens_path, mmap_mode="r")
    except Exception:  # damaged files make numpy raise many kinds: OSError, ValueError, BadZipFile, TokenError...
        return None
    if len(tokens) != offsets[-1] or len(offsets) != len(split_hashes) + 1:
        return None
    stride = -(-len(split_hashes) // _SAMPLED_DOCUMENTS)
    last_tokens = tokens[offsets[:0:-stride] - 1]
    if (last_tokens != tokenizer.end_of_document_id).any():  # a crashed machine can leave pages of zeros
        return None
    return TokenStore(tokens=tokens, offsets=offsets, split_hashes=split_hashes, fingerprint=fingerprint)


def _write(
    tokens_path: Path,
    index_path: Path,
    files: list[SourceFile],
    config: DataConfig,
    tokenizer: Tokenizer,
    progress: Progress | None,
) -> None:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    total_bytes = sum(file.size_bytes for file in files)
    done_bytes, lengths, split_hashes, content_hash = 0, [], [], hashlib.sha256()
    with _replacing(tokens_path) as out:
        _write_header(out, dtype, 0)
        for document, ids in _tokenized(files, config.text_field, tokenizer):
            stored = np.append(ids, tokenizer.end_of_document_id).astype(dtype).tobytes()
            out.write(stored)
            content_hash.update(f"{document.name}\0{len(stored)}\0".encode(errors="surrogateescape"))
            content_hash.update(stored)
            lengths.append(len(ids) + 1)
            split_hashes.append(split_hash(document.name))
            if progress is not None:  # compressed files hold more text than their size says
                done_bytes = min(done_bytes + len(document.text), total_bytes)
                progress(done_bytes, total_bytes)
        if not lengths:
            raise UserError(f"data.sources {list(config.sources)} hold no text: all documents are empty; give others")
        _write_header(out, dtype, sum(lengths))
    with _replacing(index_path) as out:
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        np.savez(out, offsets=offsets, split_hashes=np.array(split_hashes), fingerprint=content_hash.hexdigest())
    if progress is not None:
        progress(total_bytes, total_bytes)


def _tokenized(files: list[SourceFile], text_field: str, tokenizer: Tokenizer) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its ids, in order; a batch of documents is tokenized by as many threads as there are cores."""

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
    """The .npy header at the start of `out`. It has room for the largest length, so it can be written again."""
    out.seek(0)
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": (num_tokens,)})


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that takes the place of `path` at the end, all at once; nothing is left behind on failure."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp", delete=False) as out:
        try:
            yield out
            out.flush()
            os.fsync(out.fileno())
            os.replace(out.name, path)
        except BaseException:
            os.unlink(out.name)
            raise
