"""The passkey task (Mohtashami and Jaggi 2023, arXiv:2305.16300, section 4.2): a number in a text without meaning.

The wording is ours. The filler is a group of sentences that is repeated.
"""

import random

from jaxlc.evals.haystack import CountTokens, Example, largest_example

NEW_TOKENS = 16
_INTRODUCTION = "A pass key is hidden in a long text without meaning. Find it and remember it.\n\n"
_FILLER = (
    "Rain falls on the roof. The river runs past the mill. Smoke rises from the chimney. The wind turns the leaves."
)
_KEY = "The pass key is {key}. Remember that {key} is the pass key."
_QUESTION = "\n\nWhat is the pass key?"
_PREFIX = " The pass key is"


def example(length: int, depth: float, index: int, count_tokens: CountTokens, *, seed: int = 0) -> Example:
    """A text with a pass key of five digits, which is asked for at the end.

    Args:
      length: tokens of the prompt and of the new tokens together, which are not exceeded.
      depth: 0 .. 1, of the pass key among the groups of filler sentences.
    Raises:
      UserError: the length is too small.
    """
    key = str(random.Random(f"{seed} passkey {length} {depth} {index}").randrange(10_000, 100_000))

    def make(size: int) -> Example:
        parts = [_FILLER] * size
        parts.insert(round(depth * size), _KEY.format(key=key))
        return Example(
            prompt=_INTRODUCTION + " ".join(parts) + _QUESTION,
            answer_prefix=_PREFIX,
            references=(key,),
            depth=depth,
        )

    return largest_example(make, count_tokens, length, new_tokens=NEW_TOKENS, smallest=1, task="passkey")
