"""Tokenizes documents in parallel, in memory that does not depend on their length."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxlc.data.sources import SourceFile, read_documents
from jaxlc.data.tokenizers import Tokenizer

Log = Callable[[str], None]  # prints one line

_BATCH_CHARACTERS = 4 << 20  # tokenized at once, over all threads
_BYTES_PER_CHARACTER = 180  # of memory that the package tokenizers needs
_LONG_PIECE = 4 * _BATCH_CHARACTERS  # a warning comes before a longer piece is tokenized


class DocumentCounts:
    """The blocks of a document, counted while they are read."""

    def __init__(self, blocks: Iterable[bytes]):
        self.num_bytes = self.num_invalid = 0
        self._blocks = blocks

    def __iter__(self) -> Iterator[bytes]:
        for block in self._blocks:
            self.num_bytes += len(block)
            self.num_invalid += _num_invalid_characters(block)
            yield block


class Piece(NamedTuple):
    """A part of a document that is tokenized on its own."""

    text: bytes | str
    document: str  # name
    counts: DocumentCounts  # complete at the last piece
    is_last: bool


def tokenized_pieces(
    files: Sequence[SourceFile], text_field: str, tokenizer: Tokenizer, log: Log
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yields the pieces of all documents with their token IDs, in order.

    Each batch of pieces is tokenized by all cores, while the caller uses the batch before it.
    """
    with ThreadPoolExecutor(max_workers=1) as executor:
        pending = None
        for batch in _batches(_pieces(files, text_field, tokenizer, log)):
            following = batch, executor.submit(tokenizer.encode_pieces, [piece.text for piece in batch])
            if pending is not None:
                yield from zip(pending[0], pending[1].result(), strict=True)
            pending = following
        if pending is not None:
            yield from zip(pending[0], pending[1].result(), strict=True)


def _pieces(files: Sequence[SourceFile], text_field: str, tokenizer: Tokenizer, log: Log) -> Iterator[Piece]:
    for file in files:
        for document in read_documents(file, text_field):
            counts = DocumentCounts(document.blocks)
            texts = tokenizer.pieces(counts)
            text = next(texts)
            while text is not None:
                following = next(texts, None)
                if len(text) > _LONG_PIECE:
                    log(_long_piece_warning(document.name, len(text), tokenizer))
                yield Piece(text, document.name, counts, is_last=following is None)
                text = following


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _num_invalid_characters(block: bytes) -> int:
    """Characters that decoding replaces with U+FFFD."""
    try:
        block.decode()
    except UnicodeDecodeError:
        return block.decode(errors="replace").count("\ufffd") - block.count("\ufffd".encode())
    return 0


def _long_piece_warning(document: str, num_characters: int, tokenizer: Tokenizer) -> str:
    reason = f"data.tokenizer {tokenizer.name!r} {tokenizer.no_pieces_reason}"
    if not tokenizer.no_pieces_reason:
        reason = "it has no place to cut it, such as a letter before a newline or punctuation"
    gib = _BYTES_PER_CHARACTER * num_characters / 2**30
    return (
        f"warning: {num_characters / 1e6:,.0f} million characters of {document!r} are tokenized at once, because"
        f" {reason}; this needs about {gib:,.0f} GiB of host memory"
    )
