"""RULER's extraction of common words and of frequent coded words."""

import random
import string

from scipy.special import zeta

from jaxlc.evals.example import Example
from jaxlc.evals.materials import compound_words, single_words

_CODED_LENGTH = 6
_NOISE_WORD = "..."


def common_words(settings: dict, texts: tuple[str, str], is_short: bool, size: int, rng: random.Random) -> Example:
    """A numbered list in which ten words are more common. One solved example comes first.

    Args:
      is_short: the length is below 4,096 tokens, for which RULER repeats words less often.
      size: number of different words, at least 10.
    """
    template, prefix = texts
    num_common = settings["num_cw"]

    def problem(num_words: int, common: int, uncommon: int) -> tuple[str, list[str]]:
        words = single_words() if num_words <= len(single_words()) else compound_words()
        chosen = [words[i] for i in rng.sample(range(len(words)), num_words)]
        repeated = chosen[:num_common] * common + chosen[num_common:] * uncommon
        rng.shuffle(repeated)
        context = " ".join(f"{number}. {word}" for number, word in enumerate(repeated, 1))
        return template.format(context=context, query=""), chosen[:num_common]

    shot, answer = problem(20, 3, 1) if is_short else problem(40, 10, 3)
    solved = f"{shot}{prefix} {' '.join(f'{number}. {word}' for number, word in enumerate(answer, 1))}\n"
    question, answer = problem(size, *((6, 1) if is_short else (settings["freq_cw"], settings["freq_ucw"])))
    return Example(prompt=solved + question, answer_prefix=prefix, references=tuple(answer))


def coded_words(settings: dict, texts: tuple[str, str], vocab_size: int, size: int, rng: random.Random) -> Example:
    """Random words whose frequencies follow a zeta distribution; the most frequent one is noise.

    Args:
      size: expected number of words, in units of 10.
    """
    template, prefix = texts
    vocab: list[str] = []
    seen: set[str] = set()
    while len(vocab) < max(vocab_size, 4):
        word = "".join(rng.choices(string.ascii_lowercase, k=_CODED_LENGTH))
        if word not in seen:
            vocab.append(word)
            seen.add(word)
    vocab[0] = _NOISE_WORD
    ranks = range(1, len(vocab) + 1)
    alpha = settings["alpha"]
    counts = [int(10 * size * rank**-alpha / zeta(alpha)) for rank in ranks]
    words = [word for word, count in zip(vocab, counts) for _ in range(count)]
    rng.shuffle(words)
    return Example(
        prompt=template.format(context=" ".join(words), query=""), answer_prefix=prefix, references=tuple(vocab[1:4])
    )
