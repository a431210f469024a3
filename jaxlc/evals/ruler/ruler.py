"""The 13 tasks of RULER (Hsieh et al. 2024, arXiv:2404.06654) as prompts of an exact length.

The tasks, their settings and templates are those of https://github.com/NVIDIA/RULER (ruler_templates.json and NOTICE).
Two differences: sentences are split by a rule instead of NLTK's model, and for lists longer than the words of
`wonderwords`, common-words extraction uses its pairs ADJECTIVE-NOUN. An example depends only on its task, length, seed,
index and tokenizer.
"""

import functools
import importlib.resources
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxlc.evals.example import CountTokens, Example, largest_example
from jaxlc.evals.materials import Prose
from jaxlc.evals.ruler import ruler_lists, ruler_needles, ruler_questions
from jaxlc.evals.ruler.ruler_questions import Questions
from jaxlc.evals.scoring import match_all, match_any


@dataclass(frozen=True)
class Materials:
    """Filler text and questions for the prompts."""

    prose: Prose
    squad: Questions | None = None  # None: qa_1 is not available
    hotpotqa: Questions | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of RULER's tasks; `settings` are the arguments of scripts/synthetic.yaml."""

    kind: str  # a key of ruler_templates.json
    settings: dict = field(default_factory=dict)

    @property
    def new_tokens(self) -> int:
        return _templates()[self.kind]["tokens_to_generate"]

    @property
    def match(self) -> Callable:
        """The score of a prediction in 0 .. 1."""
        return match_any if self.kind == "qa" else match_all


def _niah(haystack: str, key: str = "words", value: str = "numbers", keys: int = 1, values: int = 1, queries: int = 1):
    return Task(
        kind="niah",
        settings=dict(
            type_haystack=haystack,
            type_needle_k=key,
            type_needle_v=value,
            num_needle_k=keys,
            num_needle_v=values,
            num_needle_q=queries,
        ),
    )


TASKS: dict[str, Task] = {
    "niah_single_1": _niah("noise"),
    "niah_single_2": _niah("essay"),
    "niah_single_3": _niah("essay", value="uuids"),
    "niah_multikey_1": _niah("essay", keys=4),
    "niah_multikey_2": _niah("needle"),
    "niah_multikey_3": _niah("needle", key="uuids", value="uuids"),
    "niah_multivalue": _niah("essay", values=4),
    "niah_multiquery": _niah("essay", queries=4),
    "vt": Task(kind="variable_tracking", settings=dict(type_haystack="noise", num_chains=1, num_hops=4)),
    "cwe": Task(kind="common_words_extraction", settings=dict(freq_cw=30, freq_ucw=3, num_cw=10)),
    "fwe": Task(kind="freq_words_extraction", settings=dict(alpha=2.0)),
    "qa_1": Task(kind="qa", settings=dict(dataset="squad")),
    "qa_2": Task(kind="qa", settings=dict(dataset="hotpotqa")),
}


@functools.cache
def _templates() -> dict:
    return json.loads((importlib.resources.files("jaxlc.evals.ruler") / "ruler_templates.json").read_text())


def example(
    name: str, index: int, length: int, count_tokens: CountTokens, materials: Materials, *, seed: int = 42
) -> Example:
    """Example `index` of a task.

    Args:
      length: tokens of prompt, answer prefix and the new tokens of the task together, which are not exceeded.
    Raises:
      UserError: the length is too small for the task, or a package or data set that it needs is missing.
    """
    task, template = TASKS[name], _templates()[TASKS[name].kind]
    budget = length - task.new_tokens

    def rng() -> random.Random:  # equal for each size of an example
        return random.Random(f"{seed} {name} {length} {index}")

    texts = template["template"], template["answer_prefix"]
    if task.kind == "niah":
        make = functools.partial(ruler_needles.needles, task.settings, texts, materials.prose)
        smallest = 5
    elif task.kind == "variable_tracking":
        seeded = random.Random(f"{seed} {name}")  # the same number of lines in all examples
        solved_lines = ruler_needles.lines_of_solved_example(task.settings, texts, count_tokens, seeded)
        make, smallest = functools.partial(ruler_needles.variables, task.settings, texts, solved_lines), 5
    elif task.kind == "common_words_extraction":
        make, smallest = functools.partial(ruler_lists.common_words, task.settings, texts, length < 4096), 10
    elif task.kind == "freq_words_extraction":
        make, smallest = functools.partial(ruler_lists.coded_words, task.settings, texts, budget // 50), 10
    else:
        questions = ruler_questions.required(getattr(materials, task.settings["dataset"]), name)
        make, smallest = functools.partial(ruler_questions.question, questions, texts, index), 1
    return largest_example(
        lambda size: make(size, rng()), count_tokens, length, new_tokens=task.new_tokens, smallest=smallest, task=name
    )
