"""Opens the corpus of a config: tokenized, split into training and held-out documents, and packed into sequences."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from jaxlc.config.schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.data.packing import PackedSequences
from jaxlc.data.sources import COMPRESSED_SUFFIXES, PYTHON_STDLIB, SourceFile, list_files
from jaxlc.data.split import Split, split_documents
from jaxlc.data.store import Progress, TokenStore, open_store
from jaxlc.data.tokenized_pieces import Log
from jaxlc.data.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A tokenized, split and packed corpus. Sizes are properties of `train` and `heldout`: `num_documents`, and per
    epoch `num_tokens` and `num_sequences`."""

    tokenizer: Tokenizer
    train: PackedSequences
    heldout: PackedSequences  # other documents or the tail of one, in the same order in every epoch
    fingerprint: str  # equal for two corpora if sequence i is the same for every i
    warnings: tuple[str, ...] = ()  # one line each, for the caller to print once per run


def open_corpus(
    config: DataConfig, progress: Progress | None = None, log: Log | None = None, tokenizer: Tokenizer | None = None
) -> Corpus:
    """Reads and tokenizes the sources (once, then they are cached), splits them by document, and packs them.

    Args:
      log: prints one line while the corpus is opened.
      tokenizer: of the config, if it is loaded already.
    Raises:
      UserError: the sources, the tokenizer, the cache, data.eval_fraction or data.seq_len cannot be used.
    """
    if not 0 < config.eval_fraction < 1:
        raise UserError(
            f"invalid value {config.eval_fraction} for data.eval_fraction: expected more than 0 and less than 1;"
            " training ends with an evaluation on held-out text, so use a small value such as 0.01"
        )
    tokenizer = tokenizer or load_tokenizer(config.tokenizer, config.end_token)
    files, num_duplicates = list_files(config.sources)
    eval_files, _ = list_files(config.eval_sources, "data.eval_sources")
    train_files = _without(files, eval_files)
    _check_max_tokens(train_files, config.seq_len)
    _check_max_tokens(eval_files, 1)
    eval_store = open_store(eval_files, config, tokenizer, progress, log) if eval_files else None
    store = open_store(train_files, config, tokenizer, progress, log)
    split = split_documents(store, config.eval_fraction, eval_store)
    train = PackedSequences(split.store, split.train_ids, config.seq_len, config.seed)
    _check_num_tokens(train.num_tokens, config.seq_len, "")
    heldout_identity = config.eval_fraction if eval_store is None else eval_store.fingerprint
    identity = (store.fingerprint, tokenizer.fingerprint, config.seq_len, heldout_identity, config.seed)
    return Corpus(
        tokenizer=tokenizer,
        train=train,
        heldout=PackedSequences(split.heldout_store, split.heldout_ids, config.seq_len, seed=None),
        fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest(),
        warnings=tuple(_warnings(config, num_duplicates, len(files) - len(train_files), store, split)),
    )


def _without(files: list[SourceFile], eval_files: list[SourceFile]) -> list[SourceFile]:
    """The files to train on.

    Raises:
      UserError: there are none.
    """
    eval_paths = {file.path.resolve() for file in eval_files}
    train_files = [file for file in files if file.path.resolve() not in eval_paths]
    if not train_files:
        raise UserError("all files of data.sources are in data.eval_sources: add files to train on to data.sources")
    return train_files


def _check_max_tokens(files: list[SourceFile], min_tokens: int) -> None:
    """Checks before tokenizing that `files` may contain `min_tokens` tokens: at most one per byte, and two per document
    for its end and for a space that a tokenizer prepends. The size of a compressed file says nothing.

    Raises:
      UserError: they cannot.
    """
    if files and not any(file.path.name.endswith(COMPRESSED_SUFFIXES) for file in files):
        max_tokens = sum(file.size_bytes + 2 for file in files if file.size_bytes)
        _check_num_tokens(max_tokens, min_tokens, "at most ", files[0].setting)


def _check_num_tokens(num_tokens: int, min_tokens: int, at_most: str, setting: str = "data.sources") -> None:
    if num_tokens == 0:
        raise UserError(f"{setting}: no text, all documents are empty; use different sources")
    if num_tokens < min_tokens:
        raise UserError(
            f"{setting}: {at_most}{num_tokens:,} tokens to train on, less than one sequence of"
            f" config.data.seq_len={min_tokens}; add text, or use a smaller --config.data.seq_len"
        )


def _warnings(
    config: DataConfig, num_duplicates: int, num_eval_files: int, store: TokenStore, split: Split
) -> Iterator[str]:
    if num_eval_files:
        yield f"data.sources: files that are also in data.eval_sources: {num_eval_files:,}; they are not trained on"
    if num_duplicates:
        yield f"data.sources: duplicate files: {num_duplicates:,}; each file is used once per epoch"
    invalid = store.invalid_utf8
    has_own_text = config.sources != (PYTHON_STDLIB,)  # Python's library has test files in other encodings
    if invalid.num_documents and has_own_text:
        yield (
            f"data.sources: documents that are not valid UTF-8: {invalid.num_documents:,} of {store.num_documents:,}"
            f" (invalid characters: {invalid.num_characters:,}, first in {invalid.first_document!r});"
            " convert them to UTF-8"
        )
    if split.tail_tokens:
        yield (
            f"data.sources: too few documents ({store.num_documents:,}) for a split by document: the last"
            f" {split.tail_tokens:,} tokens of the longest document are held out"
        )
