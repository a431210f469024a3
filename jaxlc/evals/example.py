"""Examples of an evaluation, and their size: as long as a number of tokens allows, never longer."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxlc.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and the strings that a right answer contains."""

    prompt: str  # without `answer_prefix`
    answer_prefix: str  # the start of the answer, which the model continues
    references: tuple[str, ...]
    depth: float | None = None  # position of the first answer in the prompt: 0 at the start, 1 at the end

    @property
    def text(self) -> str:
        return self.prompt + self.answer_prefix


CountTokens = Callable[[str], int]
_MAX_TRIALS = 12


def largest_example(
    make: Callable[[int], Example], count_tokens: CountTokens, length: int, *, new_tokens: int, smallest: int, task: str
) -> Example:
    """The example with the largest size, up to about 1%, whose text and `new_tokens` have at most `length` tokens.

    The number of tokens grows about linearly with the size. So the size is found by the secant method, in a few trials
    also for texts of millions of tokens; a candidate is used only if its tokens were counted.

    Args:
      make: size -> example; with a larger size the text is longer.
      smallest: the first size to try.
      task: its name, for the error.
    Raises:
      UserError: the example of size `smallest` is too long.
    """
    best, budget = make(smallest), length - new_tokens
    low, low_tokens = smallest, count_tokens(best.text)
    if low_tokens > budget:
        raise UserError(
            f"invalid length {length} for the task {task}, whose shortest example has {low_tokens:,} tokens, and its"
            f" answer {new_tokens}: use {low_tokens + new_tokens} or more"
        )
    per_size, high = low_tokens / smallest, math.inf
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
            per_size = max(1e-9, (num_tokens - low_tokens) / (size - low)) if num_tokens > low_tokens else per_size
            best, low, low_tokens = example, size, num_tokens
    return best
