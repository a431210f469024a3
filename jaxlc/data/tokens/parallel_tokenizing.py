"""Tokenizes the parts of a large corpus in processes of their own.

Parts of a corpus that are tokenized on their own, by several processes, and their files.

A part is a run of small files, or a range of the lines of a large .jsonl file. A file that is large and cannot be cut
is a part as well, which the process that writes the store tokenizes itself, with all cores. A process that is killed
leaves the complete parts, and the next one continues with the others.
"""

import contextlib
import dataclasses
import faulthandler
import io
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxlc.config.data_schema import DataConfig
from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.files import read_arrays, replacing
from jaxlc.core.text import Update, no_progress
from jaxlc.data.texts.documents import BadRecords, Fields
from jaxlc.data.texts.records import BadRecord
from jaxlc.data.texts.sources import SourceFile
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenized_pieces import Counts, Log, Piece, Reader, TokenizedPiece, tokenized_pieces
from jaxlc.data.tokens.tokenizers import load_tokenizer

_SEPARATOR = "\0"  # between names of documents


@dataclass(frozen=True, kw_only=True)
class Part:
    files: tuple[SourceFile, ...]
    num_bytes: int
    is_inline: bool = False  # tokenized by the process that writes the store


def plan_parts(files: Sequence[SourceFile], part_bytes: int, max_worker_bytes: int) -> list[Part]:
    """Cuts files into parts of about `part_bytes`, in order. Files above `max_worker_bytes` that cannot be cut are
    parts of their own."""
    parts: list[Part] = []
    pending: list[SourceFile] = []
    num_bytes = 0

    def end_part() -> None:
        nonlocal pending, num_bytes
        if pending:
            parts.append(Part(files=tuple(pending), num_bytes=num_bytes))
        pending, num_bytes = [], 0

    for file in files:
        is_large = file.size_bytes > max_worker_bytes
        if is_large and file.path.name.endswith(".jsonl"):
            end_part()
            spans = _line_spans(file.path, part_bytes)
            parts += [Part(files=(dataclasses.replace(file, lines=s),), num_bytes=s[1] - s[0]) for s in spans]
        elif is_large:
            end_part()
            parts.append(Part(files=(file,), num_bytes=file.size_bytes, is_inline=True))
        else:
            pending.append(file)
            num_bytes += file.size_bytes
            if num_bytes >= part_bytes:
                end_part()
    end_part()
    return parts


def _line_spans(path: Path, part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields ranges of whole lines: begin and end in bytes, and the number of the first line, from 1."""
    begin, number = 0, 1
    with open(path, "rb") as lines:
        while block := lines.read(part_bytes):
            block += lines.readline()
            yield begin, begin + len(block), number
            begin, number = begin + len(block), number + block.count(b"\n")


def part_arrays(tokenized: Iterable[TokenizedPiece], dtype: np.dtype) -> dict[str, np.ndarray]:
    """The documents of a part as arrays: their tokens, one after the other, names, counts and answers."""
    ids, lengths, names, counts, answers, num_answers = [], [], [], [], [], []
    length, document_answers = 0, np.zeros((0, 2), np.int64)
    for piece, piece_ids, spans in tokenized:
        ids.append(piece_ids.astype(dtype))
        document_answers = document_answers if spans is None else spans
        length += len(piece_ids)
        if piece.is_last:
            lengths.append(length)
            names.append(piece.document)
            counts.append((piece.counts.num_bytes, piece.counts.num_invalid))
            answers.append(document_answers)
            num_answers.append(len(document_answers))
            length, document_answers = 0, np.zeros((0, 2), np.int64)
    return dict(
        ids=np.concatenate(ids) if ids else np.zeros(0, dtype),
        lengths=np.array(lengths, np.int64),
        names=np.frombuffer(_SEPARATOR.join(names).encode(errors="surrogateescape"), np.uint8),
        counts=np.array(counts, np.int64).reshape(-1, 2),
        answers=np.concatenate(answers) if answers else np.zeros((0, 2), np.int64),
        num_answers=np.array(num_answers, np.int64),
    )


def save_part(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes a .npz file, atomically."""
    with replacing(path) as out:
        np.savez(out, **arrays)


def read_part(path: Path, is_chats: bool) -> Iterator[TokenizedPiece]:
    """Yields the documents of a part, one piece each."""
    arrays = _arrays(path)
    ids, lengths, counts, answers = (arrays[name] for name in ("ids", "lengths", "counts", "answers"))
    names = arrays["names"].tobytes().decode(errors="surrogateescape").split(_SEPARATOR)
    num_answers = arrays["num_answers"]
    at, answers_at = 0, 0
    for number, length in enumerate(lengths.tolist()):
        spans = answers[answers_at : answers_at + num_answers[number]] if is_chats else None
        piece = Piece(b"", names[number], Counts(*counts[number].tolist()), is_last=True)
        yield TokenizedPiece(piece, ids[at : at + length], spans)
        at, answers_at = at + length, answers_at + int(num_answers[number])


def add_records_of_part(path: Path, reader: Reader) -> None:
    """Adds the errors of the records of a part that were skipped, and its notes, to those of `reader`."""
    texts = [_arrays(path)[name].tobytes().decode(errors="replace") for name in ("bad_records", "notes")]
    for line in texts[0].split("\n")[:-1]:
        reader.bad_records.add(BadRecord(line))
    reader.encoder.notes.update(json.loads(texts[1]))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        arrays = read_arrays(path)
        ids, lengths, answers, num_answers = (arrays[x] for x in ("ids", "lengths", "answers", "num_answers"))
        num_names = arrays["names"].tobytes().count(_SEPARATOR.encode()) + 1
        shapes = {lengths.shape, num_answers.shape, arrays["counts"].shape[:1], (num_names if len(lengths) else 0,)}
        is_valid = len(shapes) == 1 and (lengths >= 0).all() and (num_answers >= 0).all()
        is_valid &= {"bad_records", "notes"} <= arrays.keys()
        if not is_valid or lengths.sum() != len(ids) or num_answers.sum() != len(answers):
            raise ValueError("its arrays do not fit each other")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path} ({reason_of(error)}); remove it") from error
    return arrays


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
