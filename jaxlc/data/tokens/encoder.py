"""Encodes texts and chats, and says what ends an answer: the one place where corpora, traces,
rollouts, generation, evaluation and export get their tokens.

A prompt and its answer are encoded as one text. A token that contains a character of an answer
belongs to the answer. `tokenize` encodes the documents of a source piece by piece, in memory that
does not depend on their length.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from jaxlc.config import Config
from jaxlc.config.models.pretrained import eos_token_ids, original_of
from jaxlc.core import Log, UserError
from jaxlc.data.texts.documents import (
    ASSISTANT,
    INVALID_CHARACTERS,
    INVALID_DOCUMENTS,
    Chat,
    Document,
    Fields,
    Notes,
    read_documents,
)
from jaxlc.data.texts.records import BadRecord
from jaxlc.data.texts.sources import SourceFile
from jaxlc.data.tokens.chat_templates import (
    ChatTemplate,
    MarkedText,
    end_of_turn_id,
    fitting_template,
    load_chat_template,
)
from jaxlc.data.tokens.tokenizers import Tokenizer, with_start


class Stops(NamedTuple):
    """What ends an answer."""

    ids: list[int]  # tokens: end of turn, end of document, those that the original model names
    texts: list[str]  # such as an end of turn that is not a token, as with the tokenizer `bytes`


NO_STOPS = Stops([], [])


def stops_of(
    config: Config, tokenizer: Tokenizer, workdir: Path | None, template: ChatTemplate | None = None
) -> Stops:
    """What ends the answers of a model.

    Args:
      config: of the run, or of a model that was loaded as a run.
      workdir: of the run, with a copy of the files of the model that training started from; see `original_of`.
      template: of the prompts. None: that of the chats that the run trains on, if any.
    Raises:
      UserError: the chat template, or a file of the original model, cannot be read.
    """
    original = original_of(config.model.init_from, workdir)
    template = template or trained_template(config, tokenizer)
    end_of_turn = None if template is None else end_of_turn_id(template, tokenizer)
    ids = [] if end_of_turn is None else [end_of_turn]
    ids += [tokenizer.end_of_document_id, *(eos_token_ids(original.directory) if original else ())]
    is_text = template is not None and end_of_turn is None and bool(template.end_of_turn)
    return Stops(list(dict.fromkeys(ids)), [template.end_of_turn] if is_text else [])


def trained_template(config: Config, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of the chats that a run trains on; None: it has none.

    Traces and prompts of rollouts may be chats, which only their records say.

    Raises:
      UserError: the template of data.chat_template cannot be read.
    """
    data = config.data
    has_chats = (
        any(source.has_chats for source in data.mixture)
        or data.eval_chat_format
        or data.eval_chat_field
        or data.traces
        or config.rollouts.prompts
    )
    if data.chat_template or has_chats:
        return template_if_any(data.chat_template, tokenizer)
    return None


def template_if_any(setting: str, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of data.chat_template, or else of the tokenizer; None: it has none that can be
    used.

    Raises:
      UserError: the template of `setting` cannot be used.
    """
    try:
        template = load_chat_template(setting, tokenizer.file)
        _ = template.end_of_turn  # compiles it
    except UserError:
        if setting:
            raise
        return None
    return template


_SPECIAL_AS_TEXT = (
    "texts that contain the text of a special token, which is encoded as text (set data.parse_special_tokens=True to"
    " encode it as the token)"
)
_SPECIAL_IN_CHAT = (
    "chats with a message that contains the text of a special token, which becomes that token"
)
_STRADDLING = "answers that begin within a token, which is in the loss"


class Encoder:
    """Turns texts and chats into token ids and the spans of their answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | ChatTemplate = "",
        notes: Notes | None = None,
    ):
        """
        Args:
          chat_template: the setting data.chat_template, or a template.
          notes: gets what is noticed.
        """
        self.tokenizer = tokenizer
        self.notes = notes or Notes()
        self._chat_template = chat_template

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The template of chats.

        Raises:
          UserError: there is none, or it does not fit the tokenizer.
        """
        if isinstance(self._chat_template, ChatTemplate):
            return self._chat_template
        return fitting_template(self._chat_template, self.tokenizer)

    def render(self, chat: Chat, where: str) -> MarkedText:
        """Renders a chat; see `ChatTemplate.render`."""
        rendered = self.template.render(chat, where)
        self._note_chat(chat, rendered)
        return rendered

    def encode(
        self, texts: Sequence[MarkedText], *, special_tokens: bool = True
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The token IDs, int32 [tokens], and the answers, int64 [answers, 2], begin and end in the
        tokens, of each one.

        Args:
          special_tokens: the text of a special token means this token, as in rendered chats.
        """
        encoded = []
        plain = [text.text for text in texts]
        for text, (ids, offsets) in zip(
            texts, self.tokenizer.encode_with_offsets(plain, special_tokens)
        ):
            # The spans of tokens that contain a character of each span of characters.
            spans = np.array(text.answers, np.int64).reshape(-1, 2)
            begins = np.searchsorted(offsets[:, 1], spans[:, 0], side="right")
            ends = np.searchsorted(offsets[:, 0], spans[:, 1], side="left")
            begins[1:] = np.maximum(begins[1:], ends[:-1])  # a token belongs to one answer
            spans = np.stack([begins, ends], axis=1)[begins < ends]
            if any(
                offsets[begin, 0] < start for (begin, _), (start, _) in zip(spans, text.answers)
            ):
                self.notes.add(_STRADDLING, text.where)
            encoded.append((ids, spans))
        return encoded

    def note_text(self, text: str, where: str) -> bool:
        """Counts a text that contains the text of special tokens; returns whether it does."""
        has_special = self.tokenizer.has_special_text(text)
        if has_special:
            self.notes.add(_SPECIAL_AS_TEXT, where)
        return has_special

    def plain(self, text: str, where: str) -> np.ndarray:
        """The token IDs of a text, int32 [tokens]."""
        self.note_text(text, where)
        return self.tokenizer.encode(text.encode(errors="replace"))

    def prompt(
        self, prompt: str | Chat, where: str, answer_prefix: str = ""
    ) -> tuple[np.ndarray, str]:
        """The token IDs of a prompt, up to the start of its answer, and its text. An answer that
        ends a chat is continued.

        Args:
          answer_prefix: the start of the answer.
        Raises:
          BadRecord: see `ChatTemplate.prompt`.
        """
        if isinstance(prompt, str):
            text = prompt + answer_prefix
            return with_start(self.plain(text, where), self.tokenizer), text
        is_continued = prompt.messages[-1]["role"] == ASSISTANT
        rendered = self.template.prompt(prompt, where, continues_last=is_continued)
        self._note_chat(prompt, rendered)
        text = rendered.text + answer_prefix
        ((ids, _),) = self.encode([MarkedText(text, where)])
        return ids, text

    def continued(self, ids: np.ndarray, new: Chat, where: str) -> np.ndarray:
        """Token IDs that end with an answer, and those of the messages after it and of the next
        prompt; the given ones do not change.

        Raises:
          BadRecord: see `ChatTemplate.continuation`.
        """
        end = self.template.end_of_turn
        ((end_ids, _),) = self.encode([MarkedText(end, where)])
        text = self.template.continuation(new, where)
        if len(end_ids) and np.array_equal(ids[-len(end_ids) :], end_ids):
            text = text.removeprefix(end)
        ((new_ids, _),) = self.encode([MarkedText(text, where)])
        return np.concatenate([ids, new_ids])

    def _note_chat(self, chat: Chat, rendered: MarkedText) -> None:
        for name in rendered.left_out:
            self.notes.add(
                f"chats with a part that {self.template.name} does not render ({name})",
                rendered.where,
            )
        if any(
            self.tokenizer.has_special_text(message.get("content") or "")
            for message in chat.messages
        ):
            self.notes.add(_SPECIAL_IN_CHAT, rendered.where)


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
        pieces = _pieces(files, fields, encoder, log)
        batches = grouped(pieces, operator.attrgetter("size"), _BATCH_CHARACTERS)
        tokenized = (executor.submit(_tokenized, batch, encoder) for batch in batches)
        for current, _following in itertools.pairwise(itertools.chain(tokenized, [None])):
            # Chats of which no token has a loss are bad records.
            for item in current.result():
                if item.answers is None or len(item.answers):
                    yield item
                else:
                    encoder.notes.skip(
                        BadRecord(
                            f"{item.piece.content.where}: the tokenizer gives no token for an answer"
                        )
                    )


def _tokenized(batch: list[Piece], encoder: Encoder) -> list[TokenizedPiece]:
    contents = [piece.content for piece in batch]  # all of the kind of their source
    if isinstance(contents[0], MarkedText):
        encoded = encoder.encode(contents)
        return [TokenizedPiece(piece, *x) for piece, x in zip(batch, encoded)]
    if not isinstance(contents[0], np.ndarray):
        contents = encoder.tokenizer.encode_pieces(contents)
    return [
        TokenizedPiece(piece, with_start(ids, encoder.tokenizer) if piece.is_first else ids)
        for piece, ids in zip(batch, contents)
    ]


def _pieces(
    files: Sequence[SourceFile], fields: Fields, encoder: Encoder, log: Log
) -> Iterator[Piece]:
    tokenizer = encoder.tokenizer
    for file in files:
        for document in read_documents(file, fields, encoder.notes):
            try:
                if document.chat is not None:
                    rendered = encoder.render(document.chat, document.where)
                    num_bytes = len(rendered.text)
                    yield Piece(rendered, document.name, is_last=True, num_bytes=num_bytes)
                elif (ids := document.ids) is not None:
                    is_known = (ids >= 0) & (ids < tokenizer.vocab_size)
                    if not is_known.all():
                        raise BadRecord(
                            f"{document.where}: token {ids[~is_known][0]}, expected 0 to {tokenizer.vocab_size - 1} of"
                            " data.tokenizer"
                        )
                    num_bytes = ids.nbytes
                    if ids[-1] == tokenizer.end_of_document_id:  # which the store appends
                        ids = ids[:-1]
                    yield Piece(
                        ids, document.name, is_last=True, is_first=True, num_bytes=num_bytes
                    )
                else:
                    yield from _text_pieces(document, encoder, log)
            except BadRecord as error:
                encoder.notes.skip(error)
        path = file.path
        # the name of the store has the time; copies of a stream have none
        if (time := file.modified_ns) and not (path.exists() and path.stat().st_mtime_ns == time):
            raise UserError(
                f"{file.setting}: {path} has changed since it was listed: run the same command again when no"
                " program writes to it"
            )


def _text_pieces(document: Document, encoder: Encoder, log: Log) -> Iterator[Piece]:
    tokenizer = encoder.tokenizer
    num_bytes = num_invalid = 0

    def counted_blocks() -> Iterator[bytes]:
        nonlocal num_bytes, num_invalid
        for block in document.blocks:
            num_bytes += len(block)
            # characters that decoding replaces with U+FFFD
            num_invalid += block.decode(errors="replace").count("\ufffd")
            num_invalid -= block.count("\ufffd".encode())
            yield block

    texts = itertools.chain(tokenizer.pieces(counted_blocks()), [None])
    has_special = False
    for number, (text, following) in enumerate(itertools.pairwise(texts)):
        if not has_special and isinstance(text, str):
            has_special = encoder.note_text(text, document.name)
        if len(text) > _LONG_PIECE:
            log(_long_piece_warning(document.name, len(text), tokenizer))
        yield Piece(
            text, document.name, is_last=following is None, is_first=not number, num_bytes=num_bytes
        )
    if num_invalid:
        encoder.notes.add(INVALID_DOCUMENTS, document.name)
        encoder.notes.add(INVALID_CHARACTERS, document.name, num_invalid)


T = TypeVar("T")


def grouped(items: Iterable[T], size_of: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Groups of consecutive items, of at least the size `least` together but for the last one."""
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= least:
            yield group
            group = []
            size = 0
    if group:
        yield group


def _long_piece_warning(document: str, num_characters: int, tokenizer: Tokenizer) -> str:
    reason = f"data.tokenizer {tokenizer.name!r} {tokenizer.no_pieces_reason}"
    if not tokenizer.no_pieces_reason:
        reason = "it has no place to cut it, such as a letter before a newline or punctuation"
    gib = _BYTES_PER_CHARACTER * num_characters / 2**30
    return (
        f"warning: {num_characters / 1e6:,.0f} million characters of {document!r} are tokenized at once, because"
        f" {reason}; this needs about {gib:,.0f} GiB of host memory"
    )
