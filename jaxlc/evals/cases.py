"""The cases of an evaluation that are scored by generated text: needle, passkey and RULER."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from jaxlc.config import EvalsConfig
from jaxlc.config.eval_checks import NEEDLE, PASSKEY, RULER
from jaxlc.evals import needle, passkey, ruler
from jaxlc.evals.example import CountTokens
from jaxlc.evals.materials import prose_of
from jaxlc.evals.predictions import Case
from jaxlc.evals.ruler_questions import read_hotpotqa, read_squad
from jaxlc.evals.scoring import match_all

_QUESTION_TASKS = ("qa_1", "qa_2")


@dataclass(frozen=True, kw_only=True)
class TextCase:
    """A case, and what its score is of; see `ScoreRow`."""

    task: str
    haystack: str
    length: int
    depth: float | None = None
    num_needles: int | None = None
    case: Case


def text_cases(settings: EvalsConfig, count_tokens: CountTokens) -> Iterator[TextCase]:
    """Yields the cases of each length, in the order needle, passkey, RULER.

    Raises:
      UserError: a file with prose or questions cannot be read.
    """
    prose, ruler_tasks = prose_of(settings.haystack), _ruler_tasks(settings)
    of_case = partial(Case, num_examples=settings.num_examples)
    options = dict(count_tokens=count_tokens, seed=settings.seed)
    of_needle = dict(prose=prose, num_needles=settings.num_needles) | options
    materials = ruler.Materials(
        prose,
        squad=read_squad(settings.squad) if settings.squad else None,
        hotpotqa=read_hotpotqa(settings.hotpotqa) if settings.hotpotqa else None,
    )
    for length in settings.lengths:
        for depth in settings.depths if NEEDLE in settings.tasks else ():
            case = of_case(
                name=f"needle-{length}-{round(100 * depth)}-of-{settings.num_needles}",
                make=partial(needle.example, length, depth, **of_needle),
                match=match_all,
                new_tokens=needle.NEW_TOKENS,
            )
            subject = dict(task=NEEDLE, haystack=prose.name, length=length, depth=depth)
            yield TextCase(**subject, num_needles=settings.num_needles, case=case)
        for depth in settings.depths if PASSKEY in settings.tasks else ():
            case = of_case(
                name=f"passkey-{length}-{round(100 * depth)}",
                make=partial(passkey.example, length, depth, **options),
                match=match_all,
                new_tokens=passkey.NEW_TOKENS,
            )
            yield TextCase(task=PASSKEY, haystack="", length=length, depth=depth, case=case)
        for name in ruler_tasks:
            task = ruler.TASKS[name]
            case = of_case(
                name=f"{name}-{length}",
                make=partial(ruler.example, name, length=length, materials=materials, **options),
                match=task.match,
                new_tokens=task.new_tokens,
            )
            yield TextCase(task=name, haystack=prose.name, length=length, case=case)


def _ruler_tasks(settings: EvalsConfig) -> list[str]:
    """The names of RULER's tasks. "ruler" includes a question task only if its data set is given."""
    data_sets = dict(squad=settings.squad, hotpotqa=settings.hotpotqa)
    available = [
        name for name, task in ruler.TASKS.items() if name not in _QUESTION_TASKS or data_sets[task.settings["dataset"]]
    ]
    names = (name for task in settings.tasks for name in (available if task == RULER else [task]))
    return list(dict.fromkeys(name for name in names if name in ruler.TASKS))
