"""The cases of an evaluation that are scored by generated text: needle, passkey and RULER."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from jaxlc.config import EvalsConfig
from jaxlc.config.checks.eval_checks import NEEDLE, PASSKEY, RULER
from jaxlc.core.identity import fingerprint_of
from jaxlc.evals.haystack import CountTokens, Prose, prose_of
from jaxlc.evals.needle import NEW_TOKENS, needle_example, passkey_example
from jaxlc.evals.predictions import Case, match_all
from jaxlc.evals.ruler import ruler
from jaxlc.evals.ruler.ruler import read_hotpotqa, read_squad

_QUESTION_TASKS = ("qa_1", "qa_2")


def text_cases(settings: EvalsConfig, count_tokens: CountTokens) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yields the cases of each length, in the order needle, passkey, RULER, and what they score: fields of `ScoreRow`.

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
            yield case, dict(task=task, haystack=haystack, length=length, depth=depth, num_needles=num_needles)


def _ruler_tasks(settings: EvalsConfig) -> list[str]:
    """The names of RULER's tasks. "ruler" includes a question task only if its data set is given."""
    data_sets = dict(squad=settings.squad, hotpotqa=settings.hotpotqa)
    available = [
        name for name, task in ruler.TASKS.items() if name not in _QUESTION_TASKS or data_sets[task.settings["dataset"]]
    ]
    names = (name for task in settings.tasks for name in (available if task == RULER else [task]))
    return list(dict.fromkeys(name for name in names if name in ruler.TASKS))
