"""The cases of an evaluation that are scored by generated text: needle, passkey and RULER.

Needle and passkey are a number at a chosen depth of a text of an exact length. Needle in a haystack
hides it in prose (Kamradt 2023). The passkey task hides it in a text without meaning, a group of
sentences that is repeated (Mohtashami and Jaggi 2023, arXiv:2305.16300, section 4.2); the wording
is ours.
"""

import bisect
import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from jaxlc.config import EvalsConfig
from jaxlc.config.checks.stage_checks import NEEDLE, PASSKEY, RULER
from jaxlc.core.files import fingerprint_of
from jaxlc.evals import ruler
from jaxlc.evals.haystack import (
    CountTokens,
    Example,
    Prose,
    largest_example,
    prose_of,
    sentences_of,
)
from jaxlc.evals.predictions import Case, match_all
from jaxlc.evals.ruler import read_hotpotqa, read_squad

NEW_TOKENS = 16
_NEEDLE = "The secret number of {name} is {value}."
_QUESTION = "\n\nWhat is the secret number of {name}?"
_PREFIX = " The secret number of {name} is"
_NAMES = (
    "Alma",
    "Boris",
    "Clara",
    "Daniel",
    "Edith",
    "Felix",
    "Greta",
    "Henry",
    "Ines",
    "Jonas",
    "Karla",
    "Leo",
)
_WORDS_PER_SIZE = 4

_KEY_INTRODUCTION = (
    "A pass key is hidden in a long text without meaning. Find it and remember it.\n\n"
)
_KEY_FILLER = (
    "Rain falls on the roof. The river runs past the mill. Smoke rises from the"
    " chimney. The wind turns the leaves."
)
_KEY = "The pass key is {key}. Remember that {key} is the pass key."
_KEY_QUESTION = "\n\nWhat is the pass key?"
_KEY_PREFIX = " The pass key is"


def needle_example(
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
            sentences.insert(
                bisect.bisect(ends, at * ends[-1]), _NEEDLE.format(name=name, value=value)
            )
        asked = {"name": names[0]}
        return Example(
            prompt=" ".join(sentences) + _QUESTION.format(**asked),
            answer_prefix=_PREFIX.format(**asked),
            references=(values[0],),
            depth=depth,
        )

    return largest_example(
        make, count_tokens, length, new_tokens=NEW_TOKENS, smallest=1, task="needle"
    )


def passkey_example(
    length: int, depth: float, index: int, count_tokens: CountTokens, *, seed: int = 0
) -> Example:
    """A text with a pass key of five digits, which is asked for at the end.

    Args:
      length: tokens of the prompt and of the new tokens together, which are not exceeded.
      depth: 0 .. 1, of the pass key among the groups of filler sentences.
    Raises:
      UserError: the length is too small.
    """
    key = str(random.Random(f"{seed} passkey {length} {depth} {index}").randrange(10_000, 100_000))

    def make(size: int) -> Example:
        parts = [_KEY_FILLER] * size
        parts.insert(round(depth * size), _KEY.format(key=key))
        return Example(
            prompt=_KEY_INTRODUCTION + " ".join(parts) + _KEY_QUESTION,
            answer_prefix=_KEY_PREFIX,
            references=(key,),
            depth=depth,
        )

    return largest_example(
        make, count_tokens, length, new_tokens=NEW_TOKENS, smallest=1, task="passkey"
    )


_QUESTION_TASKS = ("qa_1", "qa_2")


def text_cases(
    settings: EvalsConfig, count_tokens: CountTokens
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yields the cases of each length, in the order needle, passkey, RULER, and what they score:
    fields of `ScoreRow`.

    Raises:
      UserError: a file with prose or questions cannot be read.
    """
    prose, ruler_tasks = prose_of(settings.haystack), _ruler_tasks(settings)
    options = dict(count_tokens=count_tokens, seed=settings.seed)
    materials = ruler.Materials(
        prose,
        squad=read_squad(settings.squad) if settings.squad else None,
        hotpotqa=read_hotpotqa(settings.hotpotqa) if settings.hotpotqa else None,
    )
    for length in settings.lengths:
        yield from _cases_at_depths(settings, prose, length, options)
        for name in ruler_tasks:
            task = ruler.TASKS[name]
            questions = getattr(materials, task.settings.get("dataset", ""), None)
            case = Case(
                name=f"{name}-{length}",
                make=partial(ruler.example, name, length=length, materials=materials, **options),
                match=task.match,
                num_examples=settings.num_examples,
                new_tokens=task.new_tokens,
                data=fingerprint_of(questions or prose.words),
            )
            yield case, dict(task=name, haystack=prose.name, length=length)


def _cases_at_depths(
    settings: EvalsConfig, prose: Prose, length: int, options: dict
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """`text_cases` of needle and passkey. `options` are further arguments of their examples."""
    needle_settings = dict(prose=prose, num_needles=settings.num_needles)
    for task, example, materials, haystack, num_needles in (
        (NEEDLE, needle_example, needle_settings, prose.name, settings.num_needles),
        (PASSKEY, passkey_example, {}, "", None),
    ):
        suffix = "" if num_needles is None else f"-of-{num_needles}"
        for depth in settings.depths if task in settings.tasks else ():
            case = Case(
                name=f"{task}-{length}-{100 * depth:g}{suffix}",
                make=partial(example, length, depth, **materials, **options),
                match=match_all,
                num_examples=settings.num_examples,
                new_tokens=NEW_TOKENS,
                data=fingerprint_of(prose.words if materials else ""),
            )
            yield (
                case,
                dict(
                    task=task,
                    haystack=haystack,
                    length=length,
                    depth=depth,
                    num_needles=num_needles,
                ),
            )


def _ruler_tasks(settings: EvalsConfig) -> list[str]:
    """The names of RULER's tasks. "ruler" includes a question task only if its data set is given."""
    data_sets = dict(squad=settings.squad, hotpotqa=settings.hotpotqa)
    available = [
        name
        for name, task in ruler.TASKS.items()
        if name not in _QUESTION_TASKS or data_sets[task.settings["dataset"]]
    ]
    names = (name for task in settings.tasks for name in (available if task == RULER else [task]))
    return list(dict.fromkeys(name for name in names if name in ruler.TASKS))
