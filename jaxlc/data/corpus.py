"""Opens the corpus of a config: tokenized, split into training and held-out documents, and packed
into sequences.

It is checked for enough text, with warnings about its text.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxlc.config import Config, DataConfig
from jaxlc.config.models import hub
from jaxlc.config.schema import SourceConfig
from jaxlc.config.values import defaults_of
from jaxlc.core import Update, UserError, no_progress
from jaxlc.core.files import sha256_of
from jaxlc.data.sequences.loader import (
    MANY,
    DataSource,
    Inputs,
    ShownTokens,
    SourceShare,
    SourceView,
)
from jaxlc.data.sequences.packing import (
    MixedSequences,
    PackedSequences,
    PackedText,
    Split,
    overlong_rule,
    packed_source,
    split_documents,
)
from jaxlc.data.texts.documents import EVAL_SETTING, INVALID_CHARACTERS, INVALID_DOCUMENTS, Fields
from jaxlc.data.texts.sources import (
    PHONE_BOOK,
    PYTHON_STDLIB,
    SourceFile,
    list_files,
    phone_book_file,
)
from jaxlc.data.tokens.store import NoText, TokenStore, open_store
from jaxlc.data.tokens.tokenizers import Tokenizer, tokenizer_of

_CHECKED_TOKENS = 2**24  # at a time


def check_has_loss(sequences: PackedSequences, what: str) -> Iterator[str]:
    """Warns about chats of which many have no token in the loss.

    Args:
      what: the setting of the source, and which of its chats, for errors.
    Raises:
      NoText: none has one.
    """
    num_chunks, num_without = sequences.num_without_loss()
    rule = (
        "overlong=truncate or cut separates long prompts from their answers; use a"
        " larger config.data.seq_len, or drop"
    )
    if num_without == num_chunks > 0:
        raise NoText(f"{what}: no chat has a token in the loss, of {num_chunks:,}: {rule}")
    if num_without > MANY * num_chunks:
        yield (
            f"{what}: chats, or parts of chats, without a token in the loss: {num_without:,} of {num_chunks:,}"
            f" ({num_without / num_chunks:.0%}): {rule}"
        )


class CorpusSource(NamedTuple):
    """One source of a corpus."""

    name: str  # "" for data.sources
    share: float  # fraction of the training tokens, as set; the shares of a corpus sum to 1
    train: PackedSequences
    # None: held-out text is from data.eval_sources, or no document is selected
    heldout: PackedSequences | None

    def view(self, tokenizer: Tokenizer) -> SourceView:
        """All documents, training and held-out ones, and those of an epoch in the order of its
        sequences.
        """
        store = self.train.store
        # The last token of a document predicts nothing.
        num_loss_tokens = int(store.offsets[-1]) - store.num_documents
        if store.answers is not None:
            num_loss_tokens = int(np.diff(store.answers).sum())
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
                tokens = sequence["tokens"][is_document]
                has_loss = sequence["loss_weights"][is_document] > 0
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

    is_balanced = True
    train: PackedText
    # other documents or the tail of one, in the same order in every epoch; None: no evaluation
    heldout: PackedText | None
    sources: tuple[CorpusSource, ...]  # one without a name for data.sources

    @classmethod
    def open(cls, config: Config, inputs: Inputs) -> "Corpus":
        with inputs.progress("reading the corpus") as update:
            return open_corpus(config.data, inputs, update)

    @property
    def epoch_sequences(self) -> int:
        return self.train.num_sequences

    def views(self) -> list[SourceView]:
        return [source.view(self.tokenizer) for source in self.sources]

    def shares(self, num_sequences: int) -> list[SourceShare]:
        counts = self.train.num_tokens_of_first(num_sequences)
        total = max(1, sum(counts))
        return [
            SourceShare(
                name=source.name or "data.sources",
                share=source.share,
                realized_share=count / total,
                num_tokens=count,
                num_epochs=count / source.train.num_tokens,
                num_documents=source.train.num_documents,
                epoch_tokens=source.train.num_tokens,
            )
            for source, count in zip(self.sources, counts)
        ]


def open_corpus(
    config: DataConfig, inputs: Inputs | None = None, progress: Update = no_progress
) -> Corpus:
    """Reads and tokenizes the sources (once, then they are cached), splits them by document, and packs them.

    Args:
      config: eval_fraction 0: nothing is held out.
      inputs: None: the tokenizer is loaded, and any token of it may occur.
      progress: called with the bytes of text that are tokenized, and in total.
    Raises:
      UserError: the sources, the tokenizer, the cache or data.seq_len cannot be used, or a token is not in the model.
    """
    if config.stream:
        raise UserError(
            "unsupported: config.data.stream where the whole corpus is read; use --config.data.stream=False and some of"
            " its files"
        )
    if inputs is None:
        tokenizer = tokenizer_of(config)
        inputs = Inputs(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    opener = StoreOpener(config=config, inputs=inputs, progress=progress)
    configs = source_configs(config)
    # Before anything is tokenized.
    files = [opener.files(source) for source in configs]
    evaluated = open_heldout(opener)
    stores = [
        opener.open(listed, Fields.from_config(source)) for listed, source in zip(files, configs)
    ]
    total_share = sum(source.share for source in configs)
    sources = [
        _open_source(
            opener,
            source,
            store,
            config.eval_fraction if evaluated is None else 0.0,
            source.share / total_share,
        )
        for source, store in zip(configs, stores)
    ]
    heldout = evaluated
    heldout_identity = config.eval_fraction
    if evaluated is not None:
        heldout_identity = evaluated.store.fingerprint
    elif config.eval_fraction:
        heldout = _in_shares(
            config, [(x.heldout, x.share) for x in sources if x.heldout is not None]
        )
    described = [
        (*identity_of(source, total_share), store.fingerprint)
        for source, store in zip(configs, stores)
    ]
    identity = (
        described if config.mixture else stores[0].fingerprint,
        inputs.tokenizer.fingerprint,
        config.seq_len,
        heldout_identity,
        config.seed,
    )
    return Corpus(
        tokenizer=inputs.tokenizer,
        train=_in_shares(config, [(source.train, source.share) for source in sources]),
        heldout=heldout,
        sources=tuple(sources),
        fingerprint=sha256_of(repr(identity)),
        warnings=tuple(opener.warnings),
    )


def source_configs(config: DataConfig) -> list[SourceConfig]:
    """The sources to train on; one without a name for data.sources."""
    if config.mixture:
        return [source for source in config.mixture if source.share > 0]
    return [SourceConfig(name="", paths=config.sources, text_field=config.text_field)]


@dataclass(frozen=True, kw_only=True)
class StoreOpener:
    """Lists the files of sources and opens their token stores."""

    config: DataConfig
    inputs: Inputs
    progress: Update
    warnings: list[str] = field(default_factory=list)

    @functools.cached_property
    def eval_files(self) -> list[SourceFile]:
        """The files of data.eval_sources."""
        return list_files(self.config.eval_sources, EVAL_SETTING).files

    def files(self, source: SourceConfig) -> list[SourceFile]:
        """The files to train on.

        Raises:
          UserError: they do not exist, cannot contain enough tokens, or `phone-book` cannot be written.
        """
        setting = setting_of(source)
        named = [
            str(phone_book_file(self.config)) if path == PHONE_BOOK else path
            for path in source.paths
        ]
        files, num_duplicates = list_files(named, setting, source.text_suffixes)
        eval_paths = {file.path.resolve() for file in self.eval_files}
        train_files = [file for file in files if file.path.resolve() not in eval_paths]
        num_evaluated = len(files) - len(train_files)
        if not files:
            raise UserError(f"{setting} is empty: set it to the files to train on")
        if not train_files:
            raise UserError(
                f"all files of {setting} are in data.eval_sources: add files to train on to {setting}"
            )
        if num_evaluated:
            self.warnings.append(
                f"{setting}: files that are also in data.eval_sources: {num_evaluated:,}; they are not trained on"
            )
        self.warnings.extend(hub.pin_advice(source.paths, setting))
        if num_duplicates:
            self.warnings.append(
                f"{setting}: duplicate files: {num_duplicates:,}; each file is used once per epoch"
            )
        return train_files

    def open(self, files: list[SourceFile], fields: Fields) -> TokenStore:
        """The token store of files.

        Raises:
          UserError: as `open_store`, or a token is not in the model.
        """
        tokenizer = self.inputs.tokenizer
        vocab_size = self.inputs.vocab_size
        store = open_store(files, self.config, fields, tokenizer, self.progress, self.inputs.log)
        # A tokenizer may have tokens that the model lacks, such as a token for images. All tokens
        # are read in this case only.
        num_tokens = len(store.tokens) if tokenizer.vocab_size > vocab_size else 0
        for start in range(0, num_tokens, _CHECKED_TOKENS):
            tokens = store.tokens[start : start + _CHECKED_TOKENS]
            if tokens.max() >= vocab_size:
                place = int((tokens >= vocab_size).argmax())
                document = int(np.searchsorted(store.offsets, start + place, side="right"))
                text = tokenizer.decode(tokens[place : place + 1])
                raise UserError(
                    f"{files[0].setting}: document {document:,} has the token {tokens[place]} ({text!r}), and the model"
                    f" has tokens 0 to {vocab_size - 1}: remove its text, or set --config.data.tokenizer to the"
                    f" tokenizer of the model, or --config.model.vocab_size={tokenizer.vocab_size}"
                )
        self.warnings.extend(store.notes.lines(files[0].setting))
        return store


def _open_source(
    opener: StoreOpener, source: SourceConfig, store: TokenStore, eval_fraction: float, share: float
) -> CorpusSource:
    """Splits and packs one source.

    Raises:
      UserError: it selects no document, or has too few tokens.
    """
    config = opener.config
    warnings = opener.warnings
    setting = setting_of(source)
    split = split_documents(store, eval_fraction, setting)
    train = packed_train(opener, source, store, split)
    heldout = packed_source(split.store, split.heldout_ids, source, config.seq_len, None)
    if heldout is None and eval_fraction:
        warnings.append(f"{setting}: no held-out document has a length that this source uses")
    if train is None:
        longest = int(np.diff(store.offsets).max())
        raise UserError(
            f"config.{setting} selects none of its {store.num_documents:,} documents, the longest of"
            f" {longest:,} tokens; change its min_tokens, max_tokens, pool, length_weights or overlong, or data.seq_len"
        )
    if not source.name and train.num_tokens < config.seq_len:
        raise UserError(
            f"data.sources: {train.num_tokens:,} tokens to train on, less than one sequence of"
            f" config.data.seq_len={config.seq_len}; add text, or use a smaller --config.data.seq_len"
        )
    if heldout is not None:
        warnings += check_has_loss(heldout, f"config.{setting}, held out")
    return CorpusSource(name=source.name, share=share, train=train, heldout=heldout)


def packed_train(
    opener: StoreOpener, source: SourceConfig, store: TokenStore, split: Split
) -> PackedSequences | None:
    """The training sequences of a source, with warnings about its text; None if it selects no document.

    Raises:
      UserError: its documents are not text, or its chats have no token with a loss.
    """
    config = opener.config
    warnings = opener.warnings
    setting = setting_of(source)
    num_invalid, first = store.notes.counts.get(INVALID_DOCUMENTS, (0, ""))
    # Python's library has test files in other encodings
    if num_invalid and source.paths != (PYTHON_STDLIB,):
        num_characters, _ = store.notes.counts[INVALID_CHARACTERS]
        fraction = num_characters / int(store.offsets[-1])
        line = (
            f"{setting}: {INVALID_DOCUMENTS}: {num_invalid:,} of {store.num_documents:,}"
            f" ({INVALID_CHARACTERS}: {num_characters:,}, first in {first!r}); convert them to UTF-8"
        )
        if fraction > MANY:
            raise UserError(f"{line}, or remove them: this is {fraction:.0%} of the text")
        warnings.append(line)
    if split.tail_tokens:
        warnings.append(
            f"{setting}: too few documents ({store.num_documents:,}) for a split by document: the last"
            f" {split.tail_tokens:,} tokens of the longest document are held out"
        )
    num_overlong = int((np.diff(store.offsets) > config.seq_len).sum())
    rule = overlong_rule(source)
    if num_overlong and rule != "cut":
        warnings.append(
            f"{setting}: documents longer than data.seq_len={config.seq_len}: {num_overlong:,} of"
            f" {store.num_documents:,}; they are {'dropped' if rule == 'drop' else 'truncated'}"
        )
    train = packed_source(split.store, split.train_ids, source, config.seq_len, config.seed)
    if train is not None:
        warnings += check_has_loss(train, f"config.{setting}")
    return train


def open_heldout(opener: StoreOpener) -> PackedSequences | None:
    """Packs the files of data.eval_sources; None: there are none.

    Raises:
      UserError: they have no token with a loss.
    """
    if not opener.eval_files:
        return None
    config = opener.config
    source = SourceConfig(
        name="",
        text_field=config.text_field,
        chat_format=config.eval_chat_format,
        chat_field=config.eval_chat_field,
    )
    store = opener.open(opener.eval_files, Fields.from_config(source))
    heldout = packed_source(store, np.arange(store.num_documents), source, config.seq_len, None)
    if heldout is None:
        raise UserError(
            f"data.eval_sources: every chat is longer than data.seq_len={config.seq_len}: use a larger one"
        )
    opener.warnings.extend(check_has_loss(heldout, EVAL_SETTING))
    return heldout


def _in_shares(config: DataConfig, parts: Sequence[tuple[PackedSequences, float]]) -> PackedText:
    """The sequences of sources with their shares.

    Raises:
      UserError: there are none.
    """
    if not parts:
        raise UserError(
            "no source of config.data.mixture has held-out documents of a length that it uses: increase"
            " config.data.eval_fraction, or set config.data.eval_sources"
        )
    sequences, shares = zip(*parts)
    return MixedSequences(sequences, shares) if config.mixture else sequences[0]


def identity_of(source: SourceConfig, total_share: float) -> tuple:
    """The settings of a source on which its sequences depend. Fields with their defaults are not in
    it, so that new fields do not change it."""
    defaults = defaults_of(SourceConfig)
    changed = [
        (name, value)
        for name, value in sorted(dataclasses.asdict(source).items())
        if name not in ("name", "paths", "share") and value != defaults[name]
    ]
    return source.name, source.share / total_share, changed


def setting_of(source: SourceConfig) -> str:
    return f"data.mixture.{source.name}" if source.name else "data.sources"
