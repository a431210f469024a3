"""Tokenizes the parts of a large corpus in processes of their own."""

import contextlib
import faulthandler
import io
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxlc.config.data_schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.core.progress_lines import Update, no_progress
from jaxlc.data.texts.documents import BadRecords, Fields
from jaxlc.data.texts.sources import SourceFile
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.parts import (
    Part,
    add_records_of_part,
    part_arrays,
    plan_parts,
    read_part,
    save_part,
)
from jaxlc.data.tokens.tokenized_pieces import Log, Reader, TokenizedPiece, tokenized_pieces
from jaxlc.data.tokens.tokenizers import load_tokenizer

MIN_BYTES = 64 << 20  # a smaller corpus is tokenized by the threads of one process, which starts sooner
_PART_BYTES = 32 << 20
_MAX_WORKER_BYTES = 128 << 20
_SECONDS_BETWEEN_POLLS = 0.05
_SECONDS_BETWEEN_COUNTS = 1.0
_MAX_BATCH_SECONDS = 600.0


def parallel_pieces(
    directory: Path,
    files: Sequence[SourceFile],
    reader: Reader,
    config: DataConfig,
    log: Log,
    progress: Update = no_progress,
) -> Iterator[TokenizedPiece]:
    """Yields the documents of all files in order, as `tokenized_pieces`; several processes tokenize them.

    Args:
      directory: of the files of the parts; complete parts in it, of an earlier process, are used.
      progress: called with the bytes that are tokenized, also of parts that are not complete.
    Raises:
      UserError: as `tokenized_pieces`.
    """
    directory.mkdir(exist_ok=True)
    parts = plan_parts(files, _PART_BYTES, _MAX_WORKER_BYTES)
    paths = [directory / f"{number:06d}.npz" for number in range(len(parts))]
    waiting = [number for number, part in enumerate(parts) if not part.is_inline and not paths[number].exists()]
    num_processes = min(config.tokenizing_processes or os.cpu_count() or 1, len(waiting) or 1)
    num_complete = sum(not part.is_inline for part in parts) - len(waiting)
    if num_complete:
        log(f"continuing to tokenize: {num_complete:,} of {len(parts):,} parts are complete")
    running: dict[int, subprocess.Popen] = {}
    total_bytes, due_seconds = sum(part.num_bytes for part in parts), 0.0
    try:
        for number, part in enumerate(parts):
            if part.is_inline:
                yield from tokenized_pieces(part.files, reader, log)
                continue
            while True:
                _poll(running)
                if time.monotonic() >= due_seconds:
                    left = [parts[i].num_bytes for i in waiting]
                    left += [max(0, parts[i].num_bytes - _count(paths[i])) for i in running]
                    left += [later.num_bytes for later in parts[number:] if later.is_inline]
                    progress(total_bytes - sum(left), total_bytes)
                    due_seconds = time.monotonic() + _SECONDS_BETWEEN_COUNTS
                while waiting and len(running) < num_processes:
                    started = waiting.pop(0)
                    running[started] = _start(parts[started], paths[started], reader, config)
                if paths[number].exists():
                    break
                time.sleep(_SECONDS_BETWEEN_POLLS)
            add_records_of_part(paths[number], reader)
            yield from read_part(paths[number], bool(reader.fields.chat))
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _counted(tokenized: Iterator[TokenizedPiece], path: Path) -> Iterator[TokenizedPiece]:
    """Writes the amount of text so far to a file once a second, for `_count`.

    The process ends with its stacks if a batch takes too long, for instance in the loops of a chat template.
    """
    faulthandler.dump_traceback_later(_MAX_BATCH_SECONDS, exit=True)
    size, due_seconds = 0, time.monotonic() + _SECONDS_BETWEEN_COUNTS
    for each in tokenized:
        size += each.piece.size
        if time.monotonic() >= due_seconds:
            path.with_suffix(".count").write_text(str(size))
            faulthandler.dump_traceback_later(_MAX_BATCH_SECONDS, exit=True)
            due_seconds = time.monotonic() + _SECONDS_BETWEEN_COUNTS
        yield each


def _count(path: Path) -> int:
    try:
        return int(path.with_suffix(".count").read_text() or 0)
    except FileNotFoundError:
        return 0


def _poll(running: dict[int, subprocess.Popen]) -> None:
    """Removes the processes that ended.

    Raises:
      UserError: one of them failed.
    """
    for number, process in list(running.items()):
        if process.poll() is None:
            continue
        del running[number]
        assert process.stderr is not None
        if process.returncode:
            message = process.stderr.read().decode(errors="replace").strip()
            if process.returncode == 2:
                raise UserError(message)
            raise UserError(f"a process that tokenizes ended with status {process.returncode}: {message[-2000:]}")


def _start(part: Part, path: Path, reader: Reader, config: DataConfig) -> subprocess.Popen:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "RAYON_NUM_THREADS": "1",  # threads of the package tokenizers
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "jaxlc.data.tokens.parallel_tokenizing"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdin is not None
    with process.stdin as stdin, contextlib.suppress(BrokenPipeError):  # `_poll` has the reason
        pickle.dump((part, path, reader.fields, config), stdin)
    return process


def tokenize_part(part: Part, path: Path, fields: Fields, config: DataConfig) -> None:
    """Tokenizes one part, in a process of its own.

    Raises:
      UserError: as `tokenized_pieces`.
    """
    tokenizer = load_tokenizer(config.tokenizer, config.end_token, config.parse_special_tokens, config.start_token)
    encoder = Encoder(tokenizer, config.chat_template)
    bad_records = io.BytesIO()  # at most one line per record of the part
    reader = Reader(fields, BadRecords(config.max_bad_records, bad_records), encoder)
    tokenized = _counted(tokenized_pieces(part.files, reader, lambda line: None), path)
    arrays = part_arrays(tokenized, np.min_scalar_type(tokenizer.vocab_size - 1))
    texts = dict(bad_records=bad_records.getvalue(), notes=json.dumps(encoder.notes.counts).encode())
    save_part(path, arrays | {name: np.frombuffer(text, np.uint8) for name, text in texts.items()})


if __name__ == "__main__":
    try:
        tokenize_part(*pickle.load(sys.stdin.buffer))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
