"""Tokenizes a large corpus in shards, by several processes.

A shard is a run of small files, or a range of the lines of a large .jsonl file; a process writes its tokens to a store
of its own. A file that is large and cannot be cut is a shard as well, which the process that writes the store of the
corpus tokenizes itself, with all cores. A process that is killed leaves the complete shards, and the next one continues
with the others.
"""

import contextlib
import dataclasses
import faulthandler
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxlc.config.schema import DataConfig
from jaxlc.core import processes
from jaxlc.core.errors import UserError
from jaxlc.core.text import Update, no_progress
from jaxlc.data.texts.documents import BAD_RECORDS, Fields, Notes
from jaxlc.data.texts.records import BadRecord
from jaxlc.data.texts.sources import SourceFile
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.store import StorePaths, TokenStore, read_store, write_store
from jaxlc.data.tokens.tokenize import Log, Piece, TokenizedPiece, tokenized_pieces
from jaxlc.data.tokens.tokenizers import tokenizer_of

MIN_BYTES = 64 << 20  # a smaller corpus is tokenized by the threads of one process, which starts sooner
_SHARD_BYTES = 32 << 20
_MAX_SHARD_BYTES = 128 << 20
_SECONDS_BETWEEN_COUNTS = 1.0
_MAX_BATCH_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Shard:
    files: tuple[SourceFile, ...]
    num_bytes: int
    is_inline: bool = False  # tokenized by the process that writes the store of the corpus


def plan_shards(files: Sequence[SourceFile], shard_bytes: int, max_shard_bytes: int) -> list[Shard]:
    """Cuts files into shards of about `shard_bytes`, in order. Files above `max_shard_bytes` that cannot be cut are
    shards of their own."""
    shards: list[Shard] = []
    pending: list[SourceFile] = []

    def end_shard() -> None:
        if pending:
            shards.append(Shard(files=tuple(pending), num_bytes=_size_of(pending)))
            pending.clear()

    for file in files:
        if file.size_bytes <= max_shard_bytes:
            pending.append(file)
            if _size_of(pending) >= shard_bytes:
                end_shard()
            continue
        end_shard()
        if file.path.name.endswith(".jsonl"):
            for begin, end, number in _line_spans(file.path, shard_bytes):
                part = dataclasses.replace(file, lines=(begin, end, number))
                shards.append(Shard(files=(part,), num_bytes=end - begin))
        else:
            shards.append(Shard(files=(file,), num_bytes=file.size_bytes, is_inline=True))
    end_shard()
    return shards


def _size_of(files: Sequence[SourceFile]) -> int:
    return sum(file.size_bytes for file in files)


def _line_spans(path: Path, shard_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields ranges of whole lines: begin and end in bytes, and the number of the first line, from 1."""
    begin, number = 0, 1
    with open(path, "rb") as lines:
        while block := lines.read(shard_bytes):
            block += lines.readline()
            yield begin, begin + len(block), number
            begin += len(block)
            number += block.count(b"\n")


def sharded_pieces(
    directory: Path,
    files: Sequence[SourceFile],
    fields: Fields,
    encoder: Encoder,
    config: DataConfig,
    log: Log,
    progress: Update = no_progress,
) -> Iterator[TokenizedPiece]:
    """Yields the documents of all files in order, as `tokenized_pieces`; several processes tokenize them.

    Args:
      directory: of the stores of the shards; complete ones in it, of an earlier process, are used.
      progress: called with the bytes that are tokenized, also of shards that are not complete.
    Raises:
      UserError: as `tokenized_pieces`.
    """
    directory.mkdir(exist_ok=True)
    shards = plan_shards(files, _SHARD_BYTES, _MAX_SHARD_BYTES)
    paths = [StorePaths.of(directory, f"{number:06d}") for number in range(len(shards))]
    own = [number for number, shard in enumerate(shards) if not shard.is_inline]
    waiting = [number for number in own if read_store(paths[number], encoder.tokenizer) is None]
    if len(waiting) < len(own):
        log(f"continuing to tokenize: {len(own) - len(waiting):,} of {len(shards):,} parts are complete")
    done_bytes = [shard.num_bytes for shard in shards]
    for number, shard in enumerate(shards):
        if shard.is_inline or number in waiting:
            done_bytes[number] = 0
    total_bytes = sum(shard.num_bytes for shard in shards)
    progress(sum(done_bytes), total_bytes)
    results = processes.run(
        tokenize_shard,
        [(shards[number], paths[number], fields, config) for number in waiting],
        config.tokenizing_processes or os.cpu_count() or 1,
        is_reused=True,
        environment={"RAYON_NUM_THREADS": "1"},  # threads of the package tokenizers
    )
    with contextlib.closing(results):
        for number, shard in enumerate(shards):
            if shard.is_inline:
                yield from tokenized_pieces(shard.files, fields, encoder, log)
                done_bytes[number] = shard.num_bytes
                continue
            while not paths[number].index.exists():
                if result := next(results, None):
                    call, value = result
                    _check(value)
                    done_bytes[waiting[call]] = min(value, shards[waiting[call]].num_bytes)
                    progress(sum(done_bytes), total_bytes)
            store = read_store(paths[number], encoder.tokenizer)
            assert store is not None, f"{paths[number].index} was just written"
            _add_notes(store, encoder.notes)
            yield from _stored_pieces(store)


def _check(value: object) -> None:
    """Raises UserError if a process has failed."""
    if isinstance(value, UserError):
        raise value
    if isinstance(value, processes.Died):
        raise UserError(f"a process that tokenizes ended with status {value.exit_code}: {value.output[-2000:]}")


def _add_notes(store: TokenStore, notes: Notes) -> None:
    if store.notes.listed_in is not None:
        for line in store.notes.listed_in.read_text(errors="replace").split("\n")[:-1]:
            notes.skip(BadRecord(line))
    notes.update({note: count for note, count in store.notes.counts.items() if note != BAD_RECORDS})


def _stored_pieces(store: TokenStore) -> Iterator[TokenizedPiece]:
    """The documents of the store of a shard, one piece each, without their end-of-document tokens."""
    begins, ends = store.offsets[:-1].tolist(), (store.offsets[1:] - 1).tolist()
    for name, begin, end in zip(store.names, begins, ends, strict=True):
        answers = None
        if store.answers is not None:
            first, last = np.searchsorted(store.answers[:, 0], (begin, end))
            answers = store.answers[first:last] - begin
        yield TokenizedPiece(Piece(b"", name, is_last=True), store.read(begin, end), answers)


def tokenize_shard(shard: Shard, paths: StorePaths, fields: Fields, config: DataConfig) -> Iterator[int]:
    """Writes the store of a shard, in a process of its own; yields the amount of text so far about once a second.

    The process ends with its stacks if a batch takes too long, for instance in the loops of a chat template.

    Raises:
      UserError: as `tokenized_pieces`.
    """
    encoder = Encoder(tokenizer_of(config), config.chat_template, Notes(config.max_bad_records))
    pieces = tokenized_pieces(shard.files, fields, encoder, lambda line: None)
    faulthandler.dump_traceback_later(_MAX_BATCH_SECONDS, exit=True)
    due_seconds = time.monotonic() + _SECONDS_BETWEEN_COUNTS
    for num_bytes in write_store(paths, pieces, encoder, has_answers=bool(fields.chat), keeps_names=True):
        if time.monotonic() >= due_seconds:
            yield num_bytes
            faulthandler.dump_traceback_later(_MAX_BATCH_SECONDS, exit=True)
            due_seconds = time.monotonic() + _SECONDS_BETWEEN_COUNTS
    faulthandler.cancel_dump_traceback_later()
    yield shard.num_bytes
