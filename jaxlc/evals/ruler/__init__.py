"""The 13 tasks of RULER: `ruler.example` makes their prompts.

The 13 tasks of RULER (Hsieh et al. 2024, arXiv:2404.06654) as prompts of an exact length.

The tasks, their settings and templates are from https://github.com/NVIDIA/RULER
(ruler_templates.json and NOTICE). Two differences: sentences are split by a rule instead of NLTK's
model, and for lists longer than the words of `wonderwords`, common-words extraction uses its pairs
ADJECTIVE-NOUN. An example depends only on its task, length, seed, index and tokenizer.

The tasks are needles in a haystack and variable tracking, extraction of common and of frequent
coded words, and question answering over documents of a data set of the user: SQuAD or HotpotQA.
"""

import bisect
import functools
import importlib.resources
import json
import random
import string
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxlc.core import UserError, reason_of
from jaxlc.core.files import local_path, read_json_file
from jaxlc.evals.haystack import (
    CountTokens,
    Example,
    Prose,
    compound_words,
    largest_example,
    sentences_of,
    single_words,
)
from jaxlc.evals.predictions import match_all, match_any

_CODED_LENGTH = 6
_NOISE_WORD = "..."


@functools.cache
def _templates() -> dict:
    return json.loads(
        (importlib.resources.files("jaxlc.evals.ruler") / "ruler_templates.json").read_text()
    )


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of RULER's tasks; `settings` are the arguments of scripts/synthetic.yaml."""

    kind: str  # a key of ruler_templates.json
    settings: dict = field(default_factory=dict)

    @property
    def template(self) -> str:
        return _templates()[self.kind]["template"]

    @property
    def prefix(self) -> str:
        """The start of the answer."""
        return _templates()[self.kind]["answer_prefix"]

    @property
    def new_tokens(self) -> int:
        return _templates()[self.kind]["tokens_to_generate"]

    @property
    def match(self) -> Callable:
        """The score of a prediction in 0 .. 1."""
        return match_any if self.kind == "qa" else match_all


def common_words(task: Task, is_short: bool, size: int, rng: random.Random) -> Example:
    """A numbered list in which ten words are more common. One solved example comes first.

    Args:
      is_short: the length is below 4,096 tokens, for which RULER repeats words less often.
      size: number of different words, at least 10.
    """
    num_common = task.settings["num_cw"]

    def problem(num_words: int, common: int, uncommon: int) -> tuple[str, list[str]]:
        words = single_words() if num_words <= len(single_words()) else compound_words()
        chosen = [words[i] for i in rng.sample(range(len(words)), num_words)]
        repeated = chosen[:num_common] * common + chosen[num_common:] * uncommon
        rng.shuffle(repeated)
        context = " ".join(f"{number}. {word}" for number, word in enumerate(repeated, 1))
        return task.template.format(context=context, query=""), chosen[:num_common]

    shot, answer = problem(20, 3, 1) if is_short else problem(40, 10, 3)
    solved = f"{shot}{task.prefix} {' '.join(f'{number}. {word}' for number, word in enumerate(answer, 1))}\n"
    question, answer = problem(
        size, *((6, 1) if is_short else (task.settings["freq_cw"], task.settings["freq_ucw"]))
    )
    return Example(prompt=solved + question, answer_prefix=task.prefix, references=tuple(answer))


def coded_words(task: Task, vocab_size: int, size: int, rng: random.Random) -> Example:
    """Random words whose frequencies follow a zeta distribution; the most frequent one is noise.

    Args:
      size: expected number of words, in units of 10.
    """
    from scipy.special import zeta  # not at the top, as in jaxlc/evals/document_loss.py

    vocab = _names(max(vocab_size, 4), _CODED_LENGTH, rng, string.ascii_lowercase)
    vocab[0] = _NOISE_WORD
    ranks = range(1, len(vocab) + 1)
    alpha = task.settings["alpha"]
    counts = [int(10 * size * rank**-alpha / zeta(alpha)) for rank in ranks]
    words = [word for word, count in zip(vocab, counts) for _ in range(count)]
    rng.shuffle(words)
    return Example(
        prompt=task.template.format(context=" ".join(words), query=""),
        answer_prefix=task.prefix,
        references=tuple(vocab[1:4]),
    )


_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
_NUM_DEPTHS = 40  # equidistant depths at which needles are inserted into prose
_WORDS_PER_SIZE = 20  # words of prose; other haystacks have one line per size
_SOLVED_TOKENS, _MIN_SOLVED_LINES = 500, 5  # the solved example of variable tracking


def needles(task: Task, prose: Prose, size: int, rng: random.Random) -> Example:
    """Questions about sentences that are hidden in a text."""
    settings = task.settings
    key_kind = settings["type_needle_k"]
    value_kind = settings["type_needle_v"]
    num_queries = settings["num_needle_q"]
    num_keys = max(settings["num_needle_k"], num_queries)
    keys = [_random(key_kind, rng) for _ in range(num_keys)]
    values = [[_random(value_kind, rng) for _ in range(settings["num_needle_v"])] for _ in keys]
    chosen = rng.sample(range(num_keys), num_queries)
    needle = functools.partial(_NEEDLE.format, type_needle_v=value_kind)
    hidden = [needle(key=key, value=x) for key, own in zip(keys, values) for x in own]
    rng.shuffle(hidden)

    if settings["type_haystack"] == "essay":
        context = _in_prose(hidden, prose, size, rng)
    else:
        lines = [_NOISE] * size
        if settings["type_haystack"] == "needle":
            lines = [
                needle(key=_random(key_kind, rng), value=_random(value_kind, rng)) for _ in lines
            ]
        _insert(lines, rng.sample(range(size + 1), len(hidden)), hidden[::-1])
        context = "\n".join(lines)

    template, prefix = texts = task.template, task.prefix
    if num_queries * settings["num_needle_v"] == 1:
        template, prefix = (
            text.replace("Some", "A")
            .replace("are all", "is")
            .replace("are", "is")
            .replace("answers", "answer")
            for text in texts
        )
        value_kind = value_kind[:-1]
    names = [keys[i] for i in chosen]
    query = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
    answers = tuple(value for i in chosen for value in values[i])
    return Example(
        prompt=template.format(type_needle_v=value_kind, context=context, query=query),
        answer_prefix=prefix.format(type_needle_v=value_kind, query=query),
        references=answers,
        depth=context.index(answers[0]) / len(context),
    )


def _random(kind: str, rng: random.Random) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return rng.choice(compound_words())
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _in_prose(hidden: list[str], prose: Prose, size: int, rng: random.Random) -> str:
    sentences = sentences_of(" ".join(prose.first(size * _WORDS_PER_SIZE)))
    depths = [round(100 * i / (_NUM_DEPTHS - 1)) / 100 for i in range(_NUM_DEPTHS)]
    places = (int(len(sentences) * depth) for depth in rng.sample(depths, len(hidden)))
    _insert(sentences, places, hidden)
    return " ".join(sentences)


def _insert(parts: list[str], places: Iterable[int], texts: Sequence[str]) -> None:
    """Inserts the texts, in this order, before the parts that are now at the sorted places."""
    for place, text in zip(sorted(places, reverse=True), reversed(texts), strict=True):
        parts.insert(place, text)


def variables(task: Task, solved_lines: int, size: int, rng: random.Random) -> Example:
    """A chain of assignments: which variables have a value? One solved example comes first.

    Args:
      solved_lines: lines of noise in the solved example, see `lines_of_solved_example`.
      size: lines of noise in the question.
    """
    question, start, names = _chain(task, solved_lines, 3, rng)
    solved = f"{question}{start} {' '.join(names)}\n\n"
    question, start, names = _chain(task, size, 5, rng)
    return Example(prompt=solved + question, answer_prefix=start, references=names)


def lines_of_solved_example(task: Task, count_tokens: CountTokens, rng: random.Random) -> int:
    """The lines of noise in the solved example of `variables`, as
    scripts/data/synthetic/variable_tracking.py of NVIDIA/RULER chooses them: as many as 500 tokens
    allow, without the solution, and at least 5."""
    # from the chat template or BOS, which the solved example does not have
    extra_tokens = count_tokens("")

    def num_tokens(num_lines: int) -> int:
        return count_tokens("".join(_chain(task, num_lines, 3, rng)[:2])) - extra_tokens

    sizes = range(_MIN_SOLVED_LINES + 1, _SOLVED_TOKENS)
    return _MIN_SOLVED_LINES + bisect.bisect_right(sizes, _SOLVED_TOKENS, key=num_tokens)


def _chain(
    task: Task, num_lines: int, name_length: int, rng: random.Random
) -> tuple[str, str, tuple[str, ...]]:
    """(question, start of the answer, names that have the value) of a text with `num_lines` lines
    of noise.
    """
    num_hops = task.settings["num_hops"]
    lines = [_NOISE] * num_lines
    names = _names(num_hops + 1, name_length, rng)
    value = str(rng.randrange(10_000, 99_999))
    chain = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:])),
    ]
    _insert(lines, rng.sample(range(num_lines), len(chain)), chain)
    context = "\n".join(lines).replace(". \n", ".\n")
    return (
        task.template.format(context=context, query=value),
        task.prefix.format(num_v=num_hops + 1, query=value),
        tuple(names),
    )


def _names(
    count: int, length: int, rng: random.Random, letters: str = string.ascii_uppercase
) -> list[str]:
    """Different random words."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(letters, k=length))] = None
    return list(names)


_SOURCES = dict(
    qa_1="the SQuAD 2.0 file dev-v2.0.json: set squad (of `jaxlc eval` --squad=FILE, of a run"
    " --config.evals.squad=FILE)",
    qa_2="the HotpotQA file hotpot_dev_distractor_v1.json: set hotpotqa (of `jaxlc eval` --hotpotqa=FILE, of a run"
    " --config.evals.hotpotqa=FILE)",
)


class Question(NamedTuple):
    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]  # documents that contain the answer
    related: tuple[int, ...]  # documents that fill the prompt first


class Questions(NamedTuple):
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


def read_squad(path: str) -> Questions:
    """Raises UserError if the file cannot be read or has another form."""

    def parse(data: Any) -> Questions:
        articles = [article["paragraphs"] for article in data["data"]]
        documents = sorted({paragraph["context"] for article in articles for paragraph in article})
        index = {document: i for i, document in enumerate(documents)}
        questions = [
            Question(
                qa["question"],
                tuple(answer["text"] for answer in qa["answers"]),
                (index[paragraph["context"]],),
                tuple(index[p["context"]] for p in article if p["context"] != paragraph["context"]),
            )
            for article in articles
            for paragraph in article
            for qa in paragraph["qas"]
            if not qa["is_impossible"]
        ]
        return Questions(tuple(documents), tuple(questions))

    return _read(path, parse)


def read_hotpotqa(path: str) -> Questions:
    """Raises UserError if the file cannot be read or has another form."""

    def parse(data: Any) -> Questions:
        texts = [
            [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]
            for item in data
        ]
        documents = sorted({text for item_texts in texts for text in item_texts})
        index = {document: i for i, document in enumerate(documents)}
        questions = [
            Question(
                item["question"], (item["answer"],), tuple(index[text] for text in item_texts), ()
            )
            for item, item_texts in zip(data, texts, strict=True)
        ]
        return Questions(tuple(documents), tuple(questions))

    return _read(path, parse)


def _read(path: str, parse) -> Questions:
    try:
        questions = parse(read_json_file(local_path(path)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read questions from {path} ({reason_of(error)})") from error
    if not questions.questions:
        raise UserError(f"no questions in {path}")
    return questions


def question(task: Task, data: Questions, index: int, size: int, rng: random.Random) -> Example:
    """Question `index` over `size` documents, besides those that contain the answer."""
    asked = data.questions[index % len(data.questions)]
    related = list(asked.related)
    rng.shuffle(related)
    known = {*asked.needed, *related}
    others = (
        [i for i in range(len(data.documents)) if i not in known] if size > len(related) else []
    )
    rng.shuffle(others)
    repeats = -(-max(0, size - len(related)) // len(others)) if others else 0
    chosen = [*asked.needed, *(related + others * repeats)[:size]]
    rng.shuffle(chosen)
    context = "\n\n".join(
        f"Document {number}:\n{data.documents[i]}" for number, i in enumerate(chosen, 1)
    )
    return Example(
        prompt=task.template.format(context=context, query=asked.text),
        answer_prefix=task.prefix,
        references=asked.answers,
    )


@dataclass(frozen=True)
class Materials:
    """Filler text and questions for the prompts."""

    prose: Prose
    squad: Questions | None = None  # None: qa_1 is not available
    hotpotqa: Questions | None = None


_NIAH = dict(
    type_haystack="essay",
    type_needle_k="words",
    type_needle_v="numbers",
    num_needle_k=1,
    num_needle_v=1,
    num_needle_q=1,
)


def _niah(**settings: Any) -> Task:
    return Task(kind="niah", settings=_NIAH | settings)


TASKS: dict[str, Task] = {
    "niah_single_1": _niah(type_haystack="noise"),
    "niah_single_2": _niah(),
    "niah_single_3": _niah(type_needle_v="uuids"),
    "niah_multikey_1": _niah(num_needle_k=4),
    "niah_multikey_2": _niah(type_haystack="needle"),
    "niah_multikey_3": _niah(type_haystack="needle", type_needle_k="uuids", type_needle_v="uuids"),
    "niah_multivalue": _niah(num_needle_v=4),
    "niah_multiquery": _niah(num_needle_q=4),
    "vt": Task(kind="variable_tracking", settings=dict(num_hops=4)),
    "cwe": Task(kind="common_words_extraction", settings=dict(freq_cw=30, freq_ucw=3, num_cw=10)),
    "fwe": Task(kind="freq_words_extraction", settings=dict(alpha=2.0)),
    "qa_1": Task(kind="qa", settings=dict(dataset="squad")),
    "qa_2": Task(kind="qa", settings=dict(dataset="hotpotqa")),
}


def example(
    name: str,
    index: int,
    length: int,
    count_tokens: CountTokens,
    materials: Materials,
    *,
    seed: int = 42,
) -> Example:
    """Example `index` of a task.

    Args:
      length: tokens of prompt, answer prefix and the new tokens of the task together, which are not exceeded.
    Raises:
      UserError: the length is too small for the task, or a package or data set that it needs is missing.
    """
    task = TASKS[name]
    budget = length - task.new_tokens

    def rng() -> random.Random:  # equal for each size of an example
        return random.Random(f"{seed} {name} {length} {index}")

    if task.kind == "niah":
        make = functools.partial(needles, task, materials.prose)
        smallest = 5
    elif task.kind == "variable_tracking":
        seeded = random.Random(f"{seed} {name}")  # the same number of lines in all examples
        solved_lines = lines_of_solved_example(task, count_tokens, seeded)
        make = functools.partial(variables, task, solved_lines)
        smallest = 5
    elif task.kind == "common_words_extraction":
        make = functools.partial(common_words, task, length < 4096)
        smallest = 10
    elif task.kind == "freq_words_extraction":
        make = functools.partial(coded_words, task, budget // 50)
        smallest = 10
    else:
        questions = getattr(materials, task.settings["dataset"])
        if questions is None:
            raise UserError(f"task {name} needs {_SOURCES[name]}")
        make = functools.partial(question, task, questions, index)
        smallest = 1
    return largest_example(
        lambda size: make(size, rng()),
        count_tokens,
        length,
        new_tokens=task.new_tokens,
        smallest=smallest,
        task=name,
    )
