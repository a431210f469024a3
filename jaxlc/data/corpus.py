"""Opens the corpus of a config: tokenized, split into training and held-out documents, and packed
into sequences.

It is checked for enough text, with warnings about its text.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxlc.config import Config
from jaxlc.config.schema import DataConfig, SourceConfig
from jaxlc.config.values import defaults_of
from jaxlc.core.errors import UserError
from jaxlc.core.text import no_progress
from jaxlc.data.sequences.mixture import MixedSequences, PackedText
from jaxlc.data.sequences.packing import (
    PackedSequences,
    Split,
    overlong_rule,
    packed_source,
    split_documents,
)
from jaxlc.data.sequences.source import (
    MANY,
    DataSource,
    Inputs,
    ShownTokens,
    SourceShare,
    SourceView,
)
from jaxlc.data.texts.documents import INVALID_CHARACTERS, INVALID_DOCUMENTS, Fields
from jaxlc.data.texts.phone_book import PHONE_BOOK, phone_book_file
from jaxlc.data.texts.records import RECORD_SUFFIXES
from jaxlc.data.texts.sources import PYTHON_STDLIB, SourceFile, list_files
from jaxlc.data.tokens.store import Progress, TokenStore, open_store
from jaxlc.data.tokens.tokenize import Log
from jaxlc.data.tokens.tokenizers import Tokenizer, tokenizer_of

_CHECKED_TOKENS = 2**24  # at a time


def check_has_loss(sequences: PackedSequences | None, what: str) -> Iterator[str]:
    """Warns about chats of which many have no token in the loss.

    Args:
      what: the setting of the source, and which of its chats, for errors.
    Raises:
      UserError: none has one.
    """
    num_chunks, num_without = (0, 0) if sequences is None else sequences.num_without_loss()
    rule = (
        "overlong=truncate or cut separates long prompts from their answers; use a"
        " larger config.data.seq_len, or drop"
    )
    if num_without == num_chunks > 0:
        raise UserError(f"{what}: no chat has a token in the loss, of {num_chunks:,}: {rule}")
    if num_without > MANY * num_chunks:
        yield (
            f"{what}: chats, or parts of chats, without a token in the loss: {num_without:,} of {num_chunks:,}"
            f" ({num_without / num_chunks:.0%}): {rule}"
        )


def without_eval_files(
    files: list[SourceFile], eval_files: list[SourceFile], setting: str
) -> list[SourceFile]:
    """The files to train on.

    Raises:
      UserError: there are none.
    """
    eval_paths = {file.path.resolve() for file in eval_files}
    train_files = [file for file in files if file.path.resolve() not in eval_paths]
    if not files:
        raise UserError(f"{setting} is empty: set it to the files to train on")
    if not train_files:
        raise UserError(
            f"all files of {setting} are in data.eval_sources: add files to train on to {setting}"
        )
    return train_files


def check_max_tokens(files: list[SourceFile], min_tokens: int) -> None:
    """Checks before tokenizing that `files` may contain `min_tokens` tokens: at most one per byte,
    and two per document for its end and for a space that a tokenizer prepends. A file of records
    may be compressed, or have bad records, which are better errors.

    Raises:
      UserError: they cannot.
    """
    if files and not any(file.path.name.endswith(RECORD_SUFFIXES) for file in files):
        max_tokens = sum(file.size_bytes + 2 for file in files if file.size_bytes)
        check_num_tokens(max_tokens, min_tokens, "at most ", files[0].setting)


def check_num_tokens(
    num_tokens: int, min_tokens: int, at_most: str, setting: str = "data.sources"
) -> None:
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
    """Checks that a model with `vocab_size` tokens has those of a store. A tokenizer may have
    tokens that the model lacks, such as that of images; so all tokens are read in this case only.

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
                " remove its text, or set --config.data.tokenizer to the tokenizer of the model, or"
                f" --config.model.vocab_size={tokenizer.vocab_size}"
            )


def text_warnings(
    store: TokenStore, split: Split, setting: str, has_own_text: bool
) -> Iterator[str]:
    """Yields warnings about text that is not UTF-8, and about documents of which only the tail is
    held out.

    Args:
      has_own_text: False: invalid UTF-8 is expected, as in some files of Python's standard library.
    Raises:
      UserError: the documents are not text.
    """
    num_documents, first = store.notes.counts.get(INVALID_DOCUMENTS, (0, ""))
    if num_documents and has_own_text:
        num_characters, _ = store.notes.counts[INVALID_CHARACTERS]
        fraction = num_characters / int(store.offsets[-1])
        line = (
            f"{setting}: {INVALID_DOCUMENTS}: {num_documents:,} of {store.num_documents:,}"
            f" ({INVALID_CHARACTERS}: {num_characters:,}, first in {first!r}); convert them to UTF-8"
        )
        if fraction > MANY:
            raise UserError(f"{line}, or remove them: this is {fraction:.0%} of the text")
        yield line
    if split.tail_tokens:
        yield (
            f"{setting}: too few documents ({store.num_documents:,}) for a split by document: the last"
            f" {split.tail_tokens:,} tokens of the longest document are held out"
        )


@dataclass(frozen=True, kw_only=True)
class CorpusSource:
    """One source of a corpus."""

    name: str  # "" for data.sources
    share: float  # fraction of the training tokens, as set; the shares of a corpus sum to 1
    train: PackedSequences
    # None: held-out text is from data.eval_sources, or no document is selected
    heldout: PackedSequences | None

    def share_of(self, num_tokens: int, total: int) -> SourceShare:
        """The share of `num_tokens` tokens of this source in `total`."""
        return SourceShare(
            name=self.name,
            share=self.share,
            realized_share=num_tokens / total,
            num_tokens=num_tokens,
            num_epochs=num_tokens / self.train.num_tokens,
            num_documents=self.train.num_documents,
            epoch_tokens=self.train.num_tokens,
        )

    def view(self, tokenizer: Tokenizer) -> SourceView:
        """All documents, training and held-out ones, and those of an epoch in the order of its
        sequences.
        """
        store = self.train.store
        # The last token of a document predicts nothing.
        num_loss_tokens = int(store.offsets[-1]) - store.num_documents
        if store.answers is not None:
            num_loss_tokens = int((store.answers[:, 1] - store.answers[:, 0]).sum())
        return SourceView(
            name=self.name or "data.sources",
            unit="document",
            lengths=np.diff(store.offsets),
            num_loss_tokens=num_loss_tokens,
            examples=([document] for document in self._documents(tokenizer)),
        )

    def _documents(self, tokenizer: Tokenizer) -> Iterator[ShownTokens]:
        for i in range(self.train.num_sequences):
            sequence = self.train[i]
            num_documents = int(sequence["segment_ids"].max())
            for number in range(1, num_documents + 1):
                is_document = sequence["segment_ids"] == number
                tokens, has_loss = (
                    sequence["tokens"][is_document],
                    sequence["loss_weights"][is_document] > 0,
                )
                is_complete = tokens[-1] == tokenizer.end_of_document_id
                end = "" if is_complete else ", without its end"
                yield ShownTokens(
                    f"sequence {i}, document {number} of {num_documents}{end}", tokens, has_loss
                )


@dataclass(frozen=True, kw_only=True)
class Corpus(DataSource):
    """A tokenized, split and packed corpus. Sizes are properties of `train` and `heldout`:
    `num_documents` and `num_tokens` of all sources; `num_sequences` and `epoch_tokens` per epoch of
    the mixture."""

    train: PackedText
    heldout: PackedText  # other documents or the tail of one, in the same order in every epoch
    sources: tuple[CorpusSource, ...]  # one without a name for data.sources

    @classmethod
    def open(cls, config: Config, inputs: Inputs) -> "Corpus":
        with inputs.progress("reading the corpus") as update:
            return open_corpus(config.data, update, inputs.log, inputs.tokenizer, inputs.vocab_size)

    def views(self) -> list[SourceView]:
        return [source.view(self.tokenizer) for source in self.sources]

    def shares(self, num_sequences: int) -> list[SourceShare]:
        if isinstance(self.train, MixedSequences):
            counts = self.train.num_tokens_of_first(num_sequences)
        else:
            counts = [self.sources[0].train.num_tokens_of_first(num_sequences)]
        total = max(1, sum(counts))
        return [source.share_of(count, total) for source, count in zip(self.sources, counts)]


def open_corpus(
    config: DataConfig,
    progress: Progress = no_progress,
    log: Log = lambda line: None,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
) -> Corpus:
    """Reads and tokenizes the sources (once, then they are cached), splits them by document, and packs them.

    Args:
      log: prints one line while the corpus is opened.
      tokenizer: of the config, if it is loaded already.
      vocab_size: of the model, which may lack tokens of the tokenizer; None: any token may occur.
    Raises:
      UserError: the sources, the tokenizer, the cache or data.seq_len cannot be used, or a token is not in the model.
    """
    tokenizer = tokenizer or tokenizer_of(config)
    eval_files, _ = list_files(config.eval_sources, "data.eval_sources")
    check_max_tokens(eval_files, 1)
    opener = _StoreOpener(
        config, tokenizer, eval_files, progress, log, vocab_size or tokenizer.vocab_size
    )
    return _open_mixture(opener) if config.mixture else _open_sources(opener)


class _StoreOpener:
    """Opens the token stores of sources and of data.eval_sources."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        eval_files: list[SourceFile],
        progress: Progress,
        log: Log,
        vocab_size: int,
    ):
        self.config, self.tokenizer, self._progress, self._log = config, tokenizer, progress, log
        self._eval_files, self._vocab_size = eval_files, vocab_size
        self.warnings: list[str] = []

    def files(
        self, paths: Sequence[str], setting: str, min_tokens: int, text_suffixes: Sequence[str] = ()
    ) -> list[SourceFile]:
        """The files to train on.

        Raises:
          UserError: they do not exist, cannot contain `min_tokens` tokens, or `phone-book` cannot be written.
        """
        named = [
            str(phone_book_file(self.config)) if path == PHONE_BOOK else path for path in paths
        ]
        files, num_duplicates = list_files(named, setting, text_suffixes)
        train_files = without_eval_files(files, self._eval_files, setting)
        check_max_tokens(train_files, min_tokens)
        if len(files) > len(train_files):
            self.warnings.append(
                f"{setting}: files that are also in data.eval_sources: {len(files) - len(train_files):,}; they are not"
                " trained on"
            )
        if num_duplicates:
            self.warnings.append(
                f"{setting}: duplicate files: {num_duplicates:,}; each file is used once per epoch"
            )
        return train_files

    def open(self, files: list[SourceFile], fields: Fields) -> TokenStore:
        store = open_store(files, self.config, fields, self.tokenizer, self._progress, self._log)
        check_ids(store, self.tokenizer, self._vocab_size, files[0].setting)
        self.warnings += store.notes.lines(files[0].setting)
        return store

    def open_eval_store(self) -> TokenStore | None:
        return (
            self.open(self._eval_files, Fields(self.config.text_field))
            if self._eval_files
            else None
        )

    def split(
        self,
        store: TokenStore,
        eval_store: TokenStore | None,
        setting: str,
        has_own_text: bool = True,
    ) -> Split:
        split = split_documents(store, self.config.eval_fraction, eval_store, setting)
        self.warnings += text_warnings(store, split, setting, has_own_text)
        return split


def _open_sources(opener: _StoreOpener) -> Corpus:
    """The corpus of data.sources."""
    config, tokenizer = opener.config, opener.tokenizer
    files = opener.files(config.sources, "data.sources", config.seq_len)
    eval_store = opener.open_eval_store()
    store = opener.open(files, Fields(config.text_field))
    # Python's library has test files in other encodings
    has_own_text = config.sources != (PYTHON_STDLIB,)
    split = opener.split(store, eval_store, "data.sources", has_own_text)
    train = PackedSequences(split.store, split.train_ids, config.seq_len, config.seed)
    check_num_tokens(train.num_tokens, config.seq_len, "")
    heldout = PackedSequences(split.heldout_store, split.heldout_ids, config.seq_len, seed=None)
    heldout_identity = config.eval_fraction if eval_store is None else eval_store.fingerprint
    identity = (
        store.fingerprint,
        tokenizer.fingerprint,
        config.seq_len,
        heldout_identity,
        config.seed,
    )
    return Corpus(
        tokenizer=tokenizer,
        train=train,
        heldout=heldout,
        sources=(
            CorpusSource(name="", share=1.0, train=train, heldout=None if eval_store else heldout),
        ),
        fingerprint=_hash(identity),
        warnings=tuple(opener.warnings),
    )


def _open_mixture(opener: _StoreOpener) -> Corpus:
    """The corpus of data.mixture."""
    config, tokenizer = opener.config, opener.tokenizer
    configs = [source for source in config.mixture if source.share > 0]
    # Before anything is tokenized.
    files = [
        opener.files(source.paths, _setting(source), 1, source.text_suffixes) for source in configs
    ]
    eval_store = opener.open_eval_store()
    fields = [Fields.from_config(source) for source in configs]
    stores = [opener.open(*arguments) for arguments in zip(files, fields)]
    total_share = sum(source.share for source in configs)
    sources = [
        _open_source(opener, source, store, eval_store, source.share / total_share)
        for source, store in zip(configs, stores)
    ]
    if eval_store is None:
        heldout = _mixed_heldout(sources)
        heldout_identity = config.eval_fraction
    else:
        heldout = PackedSequences(
            eval_store, np.arange(eval_store.num_documents), config.seq_len, seed=None
        )
        heldout_identity = eval_store.fingerprint
    described = [
        (*_identity(source, total_share), store.fingerprint)
        for source, store in zip(configs, stores)
    ]
    identity = (described, tokenizer.fingerprint, config.seq_len, heldout_identity, config.seed)
    return Corpus(
        tokenizer=tokenizer,
        train=MixedSequences(
            [source.train for source in sources], [source.share for source in sources]
        ),
        heldout=heldout,
        sources=tuple(sources),
        fingerprint=_hash(identity),
        warnings=tuple(opener.warnings),
    )


def _open_source(
    opener: _StoreOpener,
    source: SourceConfig,
    store: TokenStore,
    eval_store: TokenStore | None,
    share: float,
) -> CorpusSource:
    """Splits and packs one source of a mixture.

    Raises:
      UserError: it selects no document.
    """
    config = opener.config
    split = opener.split(
        store, eval_store, _setting(source), has_own_text=source.paths != (PYTHON_STDLIB,)
    )
    num_overlong = int((np.diff(store.offsets) > config.seq_len).sum())
    if num_overlong and overlong_rule(source) != "cut":
        rule = {"drop": "dropped", "truncate": "truncated"}[overlong_rule(source)]
        opener.warnings.append(
            f"{_setting(source)}: documents longer than data.seq_len={config.seq_len}: {num_overlong:,} of"
            f" {store.num_documents:,}; they are {rule}"
        )
    train = packed_source(split.store, split.train_ids, source, config.seq_len, config.seed)
    heldout = None
    if eval_store is None:
        heldout = packed_source(
            split.heldout_store, split.heldout_ids, source, config.seq_len, None
        )
        if heldout is None:
            opener.warnings.append(
                f"{_setting(source)}: no held-out document has a length that this source uses"
            )
    if train is None:
        longest = int(np.diff(store.offsets).max())
        raise UserError(
            f"config.{_setting(source)} selects none of its {store.num_documents:,} documents, the longest of"
            f" {longest:,} tokens; change its min_tokens, max_tokens, pool, length_weights or overlong, or data.seq_len"
        )
    for sequences, what in ((train, ""), (heldout, ", held out")):
        opener.warnings += check_has_loss(sequences, f"config.{_setting(source)}{what}")
    return CorpusSource(name=source.name, share=share, train=train, heldout=heldout)


def _mixed_heldout(sources: Sequence[CorpusSource]) -> MixedSequences:
    """The held-out text of all sources that have some, in the shares of the mixture.

    Raises:
      UserError: no source has held-out text.
    """
    parts = [(source.heldout, source.share) for source in sources if source.heldout is not None]
    if not parts:
        raise UserError(
            "no source of config.data.mixture has held-out documents of a length that it uses: increase"
            " config.data.eval_fraction, or set config.data.eval_sources"
        )
    return MixedSequences([heldout for heldout, _ in parts], [share for _, share in parts])


def _identity(source: SourceConfig, total_share: float) -> tuple:
    """The settings of a source on which its sequences depend. Fields with their defaults are not in
    it, so that new fields do not change it."""
    fields = dataclasses.asdict(source).items()
    changed = sorted(
        (name, value) for name, value in fields if name not in ("name", "paths", "share")
    )
    defaults = defaults_of(SourceConfig)
    return (
        source.name,
        source.share / total_share,
        [item for item in changed if item[1] != defaults[item[0]]],
    )


def _setting(source: SourceConfig) -> str:
    return f"data.mixture.{source.name}"


def _hash(identity: tuple) -> str:
    return hashlib.sha256(repr(identity).encode()).hexdigest()
