"""The cache of tokenized corpora, data.cache_dir: each is tokenized once, by one of the processes that share the cache.

The key of a token store is a hash of the source files, the tokenizer and the settings.
"""

import hashlib
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jaxlc.config.schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.core.files import local_path, locked, write_errors_explained
from jaxlc.core.text import Update, no_progress
from jaxlc.data.texts.documents import BAD_RECORDS, Fields, Notes
from jaxlc.data.texts.sources import SourceFile
from jaxlc.data.tokens import shards
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.store import StorePaths, TokenStore, read_store, write_store
from jaxlc.data.tokens.tokenize import Log, tokenized_pieces
from jaxlc.data.tokens.tokenizers import Tokenizer

Progress = Update  # called with the bytes of text that are tokenized, and in total

_FORMAT = 2  # increment it when the stored content changes; files of an older format are then ignored
_LEFTOVER_SECONDS = 3600  # temporary files that no process has written to for this time are deleted


def open_store(
    files: Sequence[SourceFile],
    config: DataConfig,
    fields: Fields,
    tokenizer: Tokenizer,
    progress: Progress = no_progress,
    log: Log = lambda line: None,
) -> TokenStore:
    """Opens the tokenized corpus of `files` from the cache; tokenizes it first if the cache has no valid copy.

    Files that changed since (size or modification time) make another store. Of several processes that share the cache,
    one tokenizes and the others wait for it. If it fails or is killed, the next one tokenizes.

    Args:
      log: prints that this process waits, and warnings.
    Raises:
      UserError: files cannot be read or contain no text, or the cache directory cannot be written.
    """
    directory = local_path(config.cache_dir)
    encoder = Encoder(tokenizer, config.chat_template, Notes(config.max_bad_records))
    key = _cache_key(files, fields, encoder)
    paths = StorePaths.of(directory, key)

    def on_wait(holder: str) -> None:
        log(f"waiting for {holder}, which tokenizes the same corpus to data.cache_dir {config.cache_dir!r}")

    store = read_store(paths, tokenizer)
    if store is None:
        advice = "use a writable directory with enough space for the tokenized corpus"
        with write_errors_explained(f"data.cache_dir {config.cache_dir!r}", advice):
            directory.mkdir(parents=True, exist_ok=True)
            with locked(directory / f"{key}.lock.tmp", on_wait):
                if read_store(paths, tokenizer) is None:  # no other process has written it meanwhile
                    _delete_leftovers(directory, key)
                    _tokenize(paths, directory / f"{key}.shards", files, fields, encoder, config, progress, log)
        store = read_store(paths, tokenizer)
        assert store is not None, f"{paths.tokens} was just written"
    if not store.num_documents:
        raise UserError(f"{files[0].setting}: no text, all documents are empty; use different sources")
    num_bad_records, first = store.notes.counts.get(BAD_RECORDS, (0, ""))
    if num_bad_records > config.max_bad_records:  # it was written with a higher limit
        raise UserError(
            f"{first}; {num_bad_records:,} records cannot be used, more than"
            f" data.max_bad_records={config.max_bad_records}"
        )
    return store


def _cache_key(files: Sequence[SourceFile], fields: Fields, encoder: Encoder) -> str:
    described = [(file.name, str(file.path.resolve()), file.size_bytes, file.modified_ns) for file in files]
    if fields.chat:
        read = (*fields, encoder.template.identity)
    else:  # as in older versions
        read = (fields.tokens, "", ()) if fields.tokens else fields.text
    identity = (_FORMAT, encoder.tokenizer.fingerprint, read, described)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:24]


def _tokenize(
    paths: StorePaths,
    shards_directory: Path,
    files: Sequence[SourceFile],
    fields: Fields,
    encoder: Encoder,
    config: DataConfig,
    progress: Progress,
    log: Log,
) -> None:
    """Writes the store of a corpus; by several processes if it is large."""
    total_bytes = sum(file.size_bytes for file in files)
    is_large = total_bytes >= shards.MIN_BYTES
    if is_large:
        pieces = shards.sharded_pieces(shards_directory, files, fields, encoder, config, log, progress)
    else:
        pieces = tokenized_pieces(files, fields, encoder, log)
    for num_bytes in write_store(paths, pieces, encoder, has_answers=bool(fields.chat)):
        if not is_large:  # the processes are ahead of what is written
            progress(min(num_bytes, total_bytes), total_bytes)  # a compressed file contains more text than its size
    progress(total_bytes, total_bytes)
    shutil.rmtree(shards_directory, ignore_errors=True)


def _delete_leftovers(directory: Path, key: str) -> None:
    """Deletes the temporary files of processes that were killed."""
    for path in directory.glob(f"{key}.*.*.*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                path.unlink()
