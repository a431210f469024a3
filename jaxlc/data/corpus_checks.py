"""Checks that a corpus has enough text, and warnings about its text."""

from collections.abc import Iterator

from jaxlc.core.errors import UserError
from jaxlc.data.sequences.split import Split
from jaxlc.data.texts.records import COMPRESSED_SUFFIXES
from jaxlc.data.texts.sources import SourceFile
from jaxlc.data.tokens.store import TokenStore


def without_eval_files(files: list[SourceFile], eval_files: list[SourceFile], setting: str) -> list[SourceFile]:
    """The files to train on.

    Raises:
      UserError: there are none.
    """
    eval_paths = {file.path.resolve() for file in eval_files}
    train_files = [file for file in files if file.path.resolve() not in eval_paths]
    if not train_files:
        raise UserError(f"all files of {setting} are in data.eval_sources: add files to train on to {setting}")
    return train_files


def check_max_tokens(files: list[SourceFile], min_tokens: int) -> None:
    """Checks before tokenizing that `files` may contain `min_tokens` tokens: at most one per byte, and two per document
    for its end and for a space that a tokenizer prepends. The size of a compressed file is no bound.

    Raises:
      UserError: they cannot.
    """
    if files and not any(file.path.name.endswith(COMPRESSED_SUFFIXES) for file in files):
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


def text_warnings(store: TokenStore, split: Split, setting: str, has_own_text: bool) -> Iterator[str]:
    """Yields warnings about text that is not UTF-8, and about documents of which only the tail is held out.

    Args:
      has_own_text: False: invalid UTF-8 is expected, as in some files of Python's standard library.
    """
    invalid = store.invalid_utf8
    if invalid.num_documents and has_own_text:
        yield (
            f"{setting}: documents that are not valid UTF-8: {invalid.num_documents:,} of {store.num_documents:,}"
            f" (invalid characters: {invalid.num_characters:,}, first in {invalid.first_document!r});"
            " convert them to UTF-8"
        )
    if split.tail_tokens:
        yield (
            f"{setting}: too few documents ({store.num_documents:,}) for a split by document: the last"
            f" {split.tail_tokens:,} tokens of the longest document are held out"
        )
