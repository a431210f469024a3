"""Parts of a corpus that are tokenized on their own, by several processes, and their files.

A part is a run of small files, or a range of the lines of a large .jsonl file. A file that is large and cannot be cut
is a part as well, which the process that writes the store tokenizes itself, with all cores. A process that is killed
leaves the complete parts, and the next one continues with the others.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxlc.core.atomic_files import replacing
from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.foreign_files import read_arrays
from jaxlc.data.texts.records import BadRecord
from jaxlc.data.texts.sources import SourceFile
from jaxlc.data.tokens.tokenized_pieces import Counts, Piece, Reader, TokenizedPiece

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
