"""Writes the tokens of a corpus to a .npy file whose length is not known before its end."""

import hashlib
import os
from array import array
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

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
