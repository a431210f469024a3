"""Tokenizes documents in parallel, in memory that does not depend on their length."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxlc.data.texts.documents import (
    INVALID_CHARACTERS,
    INVALID_DOCUMENTS,
    Document,
    Fields,
    read_documents,
)
from jaxlc.data.texts.records import BadRecord
from jaxlc.data.texts.sources import SourceFile
from jaxlc.data.tokens.chat_templates import MarkedText
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import Tokenizer, with_start

Log = Callable[[str], None]  # prints one line

_BATCH_CHARACTERS = 4 << 20  # tokenized at once, over all threads
_BYTES_PER_CHARACTER = 180  # memory that the package tokenizers needs
_LONG_PIECE = 4 * _BATCH_CHARACTERS  # a warning comes before a longer piece is tokenized


class Piece(NamedTuple):
    """A part of a document that is tokenized on its own: text, token IDs, or a chat."""

    content: bytes | str | np.ndarray | MarkedText
    document: str  # name
    is_last: bool
    is_first: bool = False  # it gets the start token of documents
    num_bytes: int = 0  # of the document, in its last piece

    @property
    def size(self) -> int:
        """Characters, bytes or tokens."""
        return len(self.content.text if isinstance(self.content, MarkedText) else self.content)


class TokenizedPiece(NamedTuple):
    piece: Piece
    ids: np.ndarray  # int [tokens]
    # int64 [answers, 2], begin and end in `ids`; None: not a chat
    answers: np.ndarray | None = None


def tokenized_pieces(
    files: Sequence[SourceFile], fields: Fields, encoder: Encoder, log: Log
) -> Iterator[TokenizedPiece]:
    """Yields the pieces of all documents with their token IDs, in order.

    Each batch of pieces is tokenized by all cores, while the caller uses the batch before it.
    `encoder.notes` gets what is noticed in documents, and bad records.

    Raises:
      UserError: as `read_documents`.
    """
    with ThreadPoolExecutor(max_workers=1) as executor:
        batches = _batches(_pieces(files, fields, encoder, log))
        tokenized = (executor.submit(_tokenized, batch, encoder) for batch in batches)
        for current, _following in itertools.pairwise(itertools.chain(tokenized, [None])):
            yield from _with_answers(current.result(), encoder)


def _with_answers(
    tokenized: Iterable[TokenizedPiece], encoder: Encoder
) -> Iterator[TokenizedPiece]:
    """All pieces but chats of which no token has a loss, which are bad records."""
    for item in tokenized:
        if item.answers is None or len(item.answers):
            yield item
        else:
            encoder.notes.skip(
                BadRecord(f"{item.piece.content.where}: the tokenizer gives no token for an answer")
            )


def _tokenized(batch: list[Piece], encoder: Encoder) -> list[TokenizedPiece]:
    chats = [piece.content for piece in batch if isinstance(piece.content, MarkedText)]
    texts = [piece.content for piece in batch if isinstance(piece.content, (bytes, str))]
    encoded_chats = iter(encoder.encode(chats))
    encoded_texts = iter(encoder.tokenizer.encode_pieces(texts) if texts else ())
    tokenized = []
    for piece in batch:
        answers = None
        if isinstance(piece.content, MarkedText):
            ids, answers = next(encoded_chats)
        else:
            ids = piece.content if isinstance(piece.content, np.ndarray) else next(encoded_texts)
            ids = with_start(ids, encoder.tokenizer) if piece.is_first else ids
        tokenized.append(TokenizedPiece(piece, ids, answers))
    return tokenized


def _pieces(
    files: Sequence[SourceFile], fields: Fields, encoder: Encoder, log: Log
) -> Iterator[Piece]:
    for file in files:
        for document in read_documents(file, fields, encoder.notes):
            try:
                if document.chat is not None:
                    rendered = encoder.render(document.chat, document.where)
                    num_bytes = len(rendered.text)
                    yield Piece(rendered, document.name, is_last=True, num_bytes=num_bytes)
                elif document.ids is not None:
                    yield _id_piece(document, document.ids, encoder.tokenizer)
                else:
                    yield from _text_pieces(document, encoder, log)
            except BadRecord as error:
                encoder.notes.skip(error)


def _text_pieces(document: Document, encoder: Encoder, log: Log) -> Iterator[Piece]:
    tokenizer = encoder.tokenizer
    num_bytes = num_invalid = 0

    def counted_blocks() -> Iterator[bytes]:
        nonlocal num_bytes, num_invalid
        for block in document.blocks:
            num_bytes += len(block)
            num_invalid += _num_invalid_characters(block)
            yield block

    texts = tokenizer.pieces(counted_blocks())
    text, has_special, is_first = next(texts), False, True
    while text is not None:
        following = next(texts, None)
        if not has_special and isinstance(text, str):
            has_special = encoder.note_text(text, document.name)
        if len(text) > _LONG_PIECE:
            log(_long_piece_warning(document.name, len(text), tokenizer))
        yield Piece(
            text, document.name, is_last=following is None, is_first=is_first, num_bytes=num_bytes
        )
        text, is_first = following, False
    if num_invalid:
        encoder.notes.add(INVALID_DOCUMENTS, document.name)
        encoder.notes.add(INVALID_CHARACTERS, document.name, num_invalid)


def _id_piece(document: Document, ids: np.ndarray, tokenizer: Tokenizer) -> Piece:
    """The token IDs of a document without its end-of-document token, which the store appends."""
    if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise BadRecord(
            f"{document.where}: token {wrong}, expected 0 to {tokenizer.vocab_size - 1} of data.tokenizer"
        )
    content = ids[:-1] if ids[-1] == tokenizer.end_of_document_id else ids
    return Piece(content, document.name, is_last=True, is_first=True, num_bytes=ids.nbytes)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += piece.size
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _num_invalid_characters(block: bytes) -> int:
    """Characters that decoding replaces with U+FFFD."""
    return block.decode(errors="replace").count("\ufffd") - block.count("\ufffd".encode())


def _long_piece_warning(document: str, num_characters: int, tokenizer: Tokenizer) -> str:
    reason = f"data.tokenizer {tokenizer.name!r} {tokenizer.no_pieces_reason}"
    if not tokenizer.no_pieces_reason:
        reason = "it has no place to cut it, such as a letter before a newline or punctuation"
    gib = _BYTES_PER_CHARACTER * num_characters / 2**30
    return (
        f"warning: {num_characters / 1e6:,.0f} million characters of {document!r} are tokenized at once, because"
        f" {reason}; this needs about {gib:,.0f} GiB of host memory"
    )
