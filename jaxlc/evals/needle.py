"""Needle in a haystack: a number at a chosen depth of a text of an exact length (Kamradt 2023; Mohtashami and Jaggi
2023, arXiv:2305.16300, for the passkey)."""

import bisect
import itertools
import random

from jaxlc.evals.haystack import CountTokens, Example, Prose, largest_example, sentences_of

NEW_TOKENS = 16
_NEEDLE = "The secret number of {name} is {value}."
_QUESTION = "\n\nWhat is the secret number of {name}?"
_PREFIX = " The secret number of {name} is"
_NAMES = ("Alma", "Boris", "Clara", "Daniel", "Edith", "Felix", "Greta", "Henry", "Ines", "Jonas", "Karla", "Leo")
_WORDS_PER_SIZE = 4


def example(
    length: int,
    depth: float,
    index: int,
    count_tokens: CountTokens,
    prose: Prose,
    *,
    num_needles: int = 1,
    seed: int = 0,
) -> Example:
    """A text in which the number of one name is asked.

    Args:
      length: tokens of the prompt and of the new tokens together, which are not exceeded.
      depth: 0 .. 1, of the needle that is asked for, between two sentences of the text; other needles are anywhere.
      num_needles: numbers of different names; at most 12.
    Raises:
      UserError: the length is too small.
    """
    assert 1 <= num_needles <= len(_NAMES), num_needles

    def make(size: int) -> Example:
        rng = random.Random(f"{seed} {length} {depth} {index}")
        names = rng.sample(_NAMES, num_needles)
        values = [str(value) for value in rng.sample(range(10**6, 10**7), num_needles)]
        depths = [depth, *(rng.random() for _ in names[1:])]
        sentences = sentences_of(" ".join(prose.first(size * _WORDS_PER_SIZE)))
        needles = sorted(zip(depths, names, values), reverse=True)
        ends = list(itertools.accumulate(map(len, sentences)))
        for at, name, value in needles:
            sentences.insert(bisect.bisect(ends, at * ends[-1]), _NEEDLE.format(name=name, value=value))
        asked = {"name": names[0]}
        return Example(
            prompt=" ".join(sentences) + _QUESTION.format(**asked),
            answer_prefix=_PREFIX.format(**asked),
            references=(values[0],),
            depth=depth,
        )

    return largest_example(make, count_tokens, length, new_tokens=NEW_TOKENS, smallest=1, task="needle")
