"""Predictions of an evaluation on disk: one JSON line per example, so that an interrupted evaluation resumes."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxlc.core.errors import UserError
from jaxlc.evals.example import Example
from jaxlc.evals.scoring import Score, cleaned, score_of

Generate = Callable[[Sequence[str], int], Sequence[str]]  # (prompts, new tokens) -> continuations
_SHOWN_CHARACTERS = 400  # of a prompt, at its end


@dataclass(frozen=True, kw_only=True)
class Case:
    """A set of examples that has one score."""

    name: str  # of its file
    make: Callable[[int], Example]  # index -> example
    match: Callable[[str, Sequence[str]], float]
    num_examples: int
    new_tokens: int


def run_case(
    case: Case, generate: Generate, directory: Path, identity: dict, *, batch_size: int, writes: bool = True
) -> Score:
    """Generates the predictions that `directory` does not have yet, and scores all.

    Args:
      identity: what the predictions depend on besides the case, such as the checkpoint; stored in the first line.
      batch_size: examples that are generated together.
      writes: whether this process writes the file; every process must call the function and can read the file.
    Raises:
      UserError: the file has predictions of another model or of other settings.
    """
    path = directory / f"{case.name}.jsonl"
    header = dict(case=case.name, new_tokens=case.new_tokens, **identity)
    rows = {row["index"]: row for row in _rows(path, header)}
    missing = [index for index in range(case.num_examples) if index not in rows]
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(json.dumps(header) + "\n")
    for first in range(0, len(missing), batch_size):
        indices = missing[first : first + batch_size]
        examples = [case.make(index) for index in indices]
        texts = generate([example.text for example in examples], case.new_tokens)
        for index, example, text in zip(indices, examples, texts, strict=True):
            rows[index] = dict(
                index=index,
                score=case.match(cleaned(text), example.references),
                prediction=text,
                references=example.references,
                depth=example.depth,
                end_of_prompt=example.text[-_SHOWN_CHARACTERS:],
            )
        if writes:
            with path.open("a") as file:
                file.writelines(json.dumps(rows[index]) + "\n" for index in indices)
    return score_of([rows[index]["score"] for index in range(case.num_examples)])


def _rows(path: Path, header: dict) -> Iterator[dict]:
    """The complete rows of the file; a line that an interrupted evaluation cut off is ignored."""
    if not path.exists():
        return
    lines = path.read_text().splitlines()
    stored = _parsed(lines[0]) if lines else None
    if stored != header:
        raise UserError(
            f"{path} has predictions of other settings ({_difference(stored or {}, header)}): use another --out, or"
            " remove the file"
        )
    for line in lines[1:]:
        if (row := _parsed(line)) is not None:
            yield row


def _parsed(line: str) -> dict | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _difference(stored: dict, header: dict) -> str:
    names = [name for name in header if stored.get(name) != header[name]]
    return ", ".join(f"{name} {stored.get(name)!r} instead of {header[name]!r}" for name in names)
