"""Results of an evaluation on disk: one JSON line per example, so that an interrupted evaluation resumes."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxlc.core.atomic_files import replacing
from jaxlc.core.errors import UserError
from jaxlc.core.foreign_files import parse_json
from jaxlc.core.identity import difference
from jaxlc.core.progress_lines import progress_lines
from jaxlc.evals.example import Example
from jaxlc.evals.scoring import Score, cleaned, score_of

Generate = Callable[[Sequence[Example], int], Sequence[str]]  # (examples, new tokens) -> continuations
_SHOWN_CHARACTERS = 400  # last characters of a prompt


@dataclass(frozen=True, kw_only=True)
class Case:
    """A set of examples that has one score."""

    name: str  # file name without directory
    make: Callable[[int], Example]  # index -> example
    match: Callable[[str, Sequence[str]], float]
    num_examples: int
    new_tokens: int
    data: str = ""  # fingerprint of the text in its examples


def resumed_rows(
    path: Path,
    header: dict,
    num_rows: int,
    make_rows: Callable[[list[int]], list[dict]],
    *,
    batch_size: int,
    replaces: bool = False,
) -> list[dict]:
    """The rows 0 .. num_rows - 1 of a file. Those that it does not have are made and appended, batch by batch.

    Every process of a run makes the same call; only process 0 reads and writes the file.

    Args:
      header: what the rows depend on, in the first line of the file.
      make_rows: indices of rows -> these rows.
      replaces: rows of another header are replaced instead of refused.
    Raises:
      UserError: the file has rows of another header.
    """
    text = _text_on_all_processes(path)
    changed = difference(stored_header(text), header) if text else ""
    if changed and not replaces:
        raise UserError(
            f"{path} has predictions of another model, data or settings ({changed}): use another --out, or remove"
            f" {path.parent}"
        )
    text = "" if changed else text
    rows = {row["index"]: row for row in stored_rows(text)}
    missing = [index for index in range(num_rows) if index not in rows]
    is_primary = jax.process_index() == 0
    if is_primary and missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as out:  # without an incomplete line at its end
            out.write((text or json.dumps(header) + "\n").encode())
    with progress_lines(path.stem, is_shown=is_primary) as update:
        for first in range(0, len(missing), batch_size):
            indices = missing[first : first + batch_size]
            made = [dict(index=index) | row for index, row in zip(indices, make_rows(indices), strict=True)]
            rows |= {row["index"]: row for row in made}
            if is_primary:
                with path.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in made)
            update(first + len(indices), len(missing))
    return [rows[index] for index in range(num_rows)]


def stored_header(text: str) -> dict:
    return _parsed(text.partition("\n")[0]) or {}


def stored_rows(text: str) -> Iterator[dict]:
    """Yields the rows of a file after its header; a line that an interrupted evaluation cut off is ignored."""
    yield from filter(None, map(_parsed, text.splitlines()[1:]))


def run_case(
    case: Case, generate: Generate, directory: Path, identity: dict, *, batch_size: int, replaces: bool = False
) -> Score:
    """Generates the predictions that `directory` does not have yet, and scores all.

    Args:
      identity: what the predictions depend on besides the case, such as the checkpoint; stored in the first line.
      batch_size: examples that are generated together.
      replaces: predictions of another identity are replaced.
    Raises:
      UserError: the file has predictions of another model or of other settings.
    """

    def make_rows(indices: list[int]) -> list[dict]:
        examples = [case.make(index) for index in indices]
        texts = generate(examples, case.new_tokens)
        return [
            dict(
                score=case.match(cleaned(text), example.references),
                prediction=text,
                references=example.references,
                depth=example.depth,
                end_of_prompt=example.text[-_SHOWN_CHARACTERS:],
            )
            for example, text in zip(examples, texts, strict=True)
        ]

    header = dict(case=case.name, new_tokens=case.new_tokens, data=case.data, **identity)
    path = directory / f"{case.name}.jsonl"
    rows = resumed_rows(path, header, case.num_examples, make_rows, batch_size=batch_size, replaces=replaces)
    return score_of([row["score"] for row in rows])


def _text_on_all_processes(path: Path) -> str:
    """The text of the file as process 0 reads it, without what follows the last line break; empty: no file."""
    content = np.frombuffer(path.read_bytes() if jax.process_index() == 0 and path.exists() else b"", np.uint8)
    content = content[: content.size - np.argmax(content[::-1] == ord("\n"))] if ord("\n") in content else content[:0]
    if jax.process_count() > 1:
        size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
        padded = content if jax.process_index() == 0 else np.zeros(size, np.uint8)
        content = multihost_utils.broadcast_one_to_all(padded) if size else padded
    return content.tobytes().decode(errors="replace")


def _parsed(line: str) -> dict | None:
    try:
        return parse_json(line)
    except ValueError:
        return None
