"""Checks that a corpus has enough text, and warnings about its text."""

from collections.abc import Iterator

import numpy as np

from jaxlc.core.errors import UserError
from jaxlc.data.sequences.packing import PackedSequences
from jaxlc.data.sequences.split import Split
from jaxlc.data.texts.records import RECORD_SUFFIXES
from jaxlc.data.texts.sources import SourceFile
from jaxlc.data.tokens.store import TokenStore
from jaxlc.data.tokens.tokenizers import Tokenizer

_CHECKED_TOKENS = 2**24  # at a time

MANY = 0.1  # a larger fraction of the data without a loss is worth a warning, and one of invalid text an error


def check_has_loss(sequences: PackedSequences | None, what: str) -> Iterator[str]:
    """Warns about chats of which many have no token in the loss.

    Args:
      what: the setting of the source, and which of its chats, for errors.
    Raises:
      UserError: none has one.
    """
    num_chunks, num_without = (0, 0) if sequences is None else sequences.num_without_loss()
    rule = (
        "overlong=truncate or cut separates long prompts from their answers; use a larger config.data.seq_len, or drop"
    )
    if num_without == num_chunks > 0:
        raise UserError(f"{what}: no chat has a token in the loss, of {num_chunks:,}: {rule}")
    if num_without > MANY * num_chunks:
        yield (
            f"{what}: chats, or parts of chats, without a token in the loss: {num_without:,} of {num_chunks:,}"
            f" ({num_without / num_chunks:.0%}): {rule}"
        )


def without_eval_files(files: list[SourceFile], eval_files: list[SourceFile], setting: str) -> list[SourceFile]:
    """The files to train on.

    Raises:
      UserError: there are none.
    """
    eval_paths = {file.path.resolve() for file in eval_files}
    train_files = [file for file in files if file.path.resolve() not in eval_paths]
    if not files:
        raise UserError(f"{setting} is empty: set it to the files to train on")
    if not train_files:
        raise UserError(f"all files of {setting} are in data.eval_sources: add files to train on to {setting}")
    return train_files


def check_max_tokens(files: list[SourceFile], min_tokens: int) -> None:
    """Checks before tokenizing that `files` may contain `min_tokens` tokens: at most one per byte, and two per document
    for its end and for a space that a tokenizer prepends. A file of records may be compressed, or have bad records,
    which are better errors.

    Raises:
      UserError: they cannot.
    """
    if files and not any(file.path.name.endswith(RECORD_SUFFIXES) for file in files):
        max_tokens = sum(file.size_bytes + 2 for file in files if file.size_bytes)
        check_num_tokens(max_tokens, min_tokens, "at most ", files[0].setting)


def check_num_tokens(num_tokens: int, min_tokens: int, at_most: str, setting: str = "data.sources") -> None:
    """Checks that there are `min_tokens` tokens to train on.

    Args:
      at_most: before the number of tokens in the error: "at most " for a bound, or "".
    Raises:
      UserError: there are fewer, or none.
    """
    if num_tokens == 0:
        raise UserError(f"{setting}: no text, all documents are empty; use different sources")
    if num_tokens < min_tokens:
        raise UserError(
            f"{setting}: {at_most}{num_tokens:,} tokens to train on, less than one sequence of"
            f" config.data.seq_len={min_tokens}; add text, or use a smaller --config.data.seq_len"
        )


def check_ids(store: TokenStore, tokenizer: Tokenizer, vocab_size: int, setting: str) -> None:
    """Checks that a model with `vocab_size` tokens has those of a store. A tokenizer may have tokens that the model
    lacks, such as that of images; so all tokens are read in this case only.

    Raises:
      UserError: a token is not in the model.
    """
    num_tokens = len(store.tokens) if tokenizer.vocab_size > vocab_size else 0
    for start in range(0, num_tokens, _CHECKED_TOKENS):
        tokens = store.tokens[start : start + _CHECKED_TOKENS]
        if tokens.max() >= vocab_size:
            place = int((tokens >= vocab_size).argmax())
            document = int(np.searchsorted(store.offsets, start + place, side="right"))
            raise UserError(
                f"{setting}: document {document:,} has the token {tokens[place]}"
                f" ({tokenizer.decode(tokens[place : place + 1])!r}), and the model has tokens 0 to {vocab_size - 1}:"
                " remove its text, or set --config.data.tokenizer to the tokenizer of the model"
            )


def text_warnings(store: TokenStore, split: Split, setting: str, has_own_text: bool) -> Iterator[str]:
    """Yields warnings about text that is not UTF-8, and about documents of which only the tail is held out.

    Args:
      has_own_text: False: invalid UTF-8 is expected, as in some files of Python's standard library.
    Raises:
      UserError: the documents are not text.
    """
    invalid = store.invalid_utf8
    if invalid.num_documents and has_own_text:
        fraction = invalid.num_characters / int(store.offsets[-1])
        line = (
            f"{setting}: documents that are not valid UTF-8: {invalid.num_documents:,} of {store.num_documents:,}"
            f" (invalid characters: {invalid.num_characters:,}, first in {invalid.first_document!r});"
            " convert them to UTF-8"
        )
        if fraction > MANY:
            raise UserError(f"{line}, or remove them: this is {fraction:.0%} of the text")
        yield line
    if split.tail_tokens:
        yield (
            f"{setting}: too few documents ({store.num_documents:,}) for a split by document: the last"
            f" {split.tail_tokens:,} tokens of the longest document are held out"
        )
