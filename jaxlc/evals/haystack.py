"""Prompts of evaluations: words and prose that fill them, and the largest example that a number of
tokens allows.
"""

import ast
import functools
import importlib.resources
import math
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxlc.core import UserError, errors, reason_of
from jaxlc.core.files import local_path

DOCSTRINGS = "python-docstrings"
_WORD_FILES = ("nounlist.txt", "adjectivelist.txt", "verblist.txt")


@dataclass(frozen=True)
class Prose:
    """Text for haystacks, as words."""

    name: str  # in the names of scores
    words: tuple[str, ...]

    def first(self, num_words: int) -> list[str]:
        """The first words, from the start again after the end."""
        repeats = -(-num_words // len(self.words))
        return list((self.words * repeats)[:num_words])


def prose_of(paths: tuple[str, ...]) -> Prose:
    """The text of files; without files, the docstrings of Python's standard library, which are
    always at hand.

    Raises:
      UserError: a file cannot be read, or there is no text.
    """
    if not paths and (words := _docstring_words()):
        return Prose(DOCSTRINGS, words)
    if not paths:
        raise UserError(
            "this Python has no sources of its standard library, whose docstrings are the haystack: use files, with"
            " evals.haystack"
        )
    try:
        text = " ".join(local_path(path).read_text("utf-8", "replace") for path in paths)
    except OSError as error:
        raise UserError(
            f"cannot read the haystack {error.filename} ({reason_of(error)})"
        ) from error
    if not text.split():
        raise UserError(f"no text in the haystack {', '.join(paths)}: use different files")
    return Prose("+".join(Path(path).stem for path in paths), tuple(text.split()))


@functools.cache
def _docstring_words() -> tuple[str, ...]:
    """Paragraphs of prose in the docstrings of the standard library, by name of the module."""
    words: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # e.g. a test file of the library with invalid syntax
        nodes = (
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        )
        for docstring in filter(None, map(ast.get_docstring, nodes)):
            for paragraph in docstring.split("\n\n"):
                text = " ".join(paragraph.split())
                if re.fullmatch(r"[A-Z][\w\s,;:'\"()/.-]{60,}\.", text):
                    words += text.split(" ")
    return tuple(words)


@functools.cache
def word_lists() -> tuple[tuple[str, ...], ...]:
    """Nouns, adjectives and verbs of the package `wonderwords`, which RULER uses.

    Raises:
      UserError: it is not installed.
    """
    errors.require("wonderwords", "the words of this evaluation")
    directory = importlib.resources.files("wonderwords") / "assets"
    return tuple(tuple((directory / name).read_text("utf-8").split()) for name in _WORD_FILES)


class CompoundWords:
    """All pairs ADJECTIVE-NOUN as a sequence, which is not stored: there are millions."""

    def __init__(self):
        nouns, adjectives, _ = word_lists()
        self._nouns = sorted(set(nouns))
        self._adjectives = sorted(set(adjectives))

    def __len__(self) -> int:
        return len(self._nouns) * len(self._adjectives)

    def __getitem__(self, index: int) -> str:
        adjective, noun = divmod(index, len(self._nouns))
        return f"{self._adjectives[adjective]}-{self._nouns[noun]}"


compound_words = functools.cache(CompoundWords)


@functools.cache
def single_words() -> tuple[str, ...]:
    """All nouns, adjectives and verbs, sorted."""
    return tuple(sorted({word for words in word_lists() for word in words}))


def sentences_of(text: str) -> list[str]:
    """Splits prose after full stops, question marks and exclamation marks that are followed by a
    capital letter.
    """
    return re.split(r"(?<=[.!?]) (?=[A-Z\"'(])", text)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and the strings that a right answer contains."""

    prompt: str  # without `answer_prefix`
    answer_prefix: str  # the start of the answer, which the model continues
    references: tuple[str, ...]
    # position of the first answer in the prompt: 0 at the start, 1 at the end
    depth: float | None = None

    @property
    def text(self) -> str:
        return self.prompt + self.answer_prefix


CountTokens = Callable[[str], int]
_MAX_TRIALS = 12


def largest_example(
    make: Callable[[int], Example],
    count_tokens: CountTokens,
    length: int,
    *,
    new_tokens: int,
    smallest: int,
    task: str,
) -> Example:
    """The example with the largest size, up to about 1%, whose text and `new_tokens` have at most
    `length` tokens.

    The number of tokens grows about linearly with the size. So the size is found by the secant
    method, in a few trials also for texts of millions of tokens; a candidate is used only if its
    tokens were counted.

    Args:
      make: size -> example; with a larger size the text is longer.
      smallest: the first size to try.
      task: its name, for the error.
    Raises:
      UserError: the example of size `smallest` is too long.
    """
    best = make(smallest)
    budget = length - new_tokens
    low = smallest
    low_tokens = count_tokens(best.text)
    if low_tokens > budget:
        raise UserError(
            f"invalid length {length} for the task {task}, whose shortest example has {low_tokens:,} tokens, and its"
            f" answer {new_tokens}: use {low_tokens + new_tokens} or more"
        )
    per_size = low_tokens / smallest
    high = math.inf
    for _ in range(_MAX_TRIALS):
        size = min(low + max(1, int((budget - low_tokens) / per_size)), high - 1)
        if size <= low or budget - low_tokens < 0.01 * budget and high < math.inf:
            break
        example = make(int(size))
        num_tokens = count_tokens(example.text)
        if num_tokens > budget:
            high = size
            per_size = max(per_size * 1.05, (num_tokens - low_tokens) / (size - low))
        else:
            per_size = (
                max(1e-9, (num_tokens - low_tokens) / (size - low))
                if num_tokens > low_tokens
                else per_size
            )
            best = example
            low = size
            low_tokens = num_tokens
    return best
