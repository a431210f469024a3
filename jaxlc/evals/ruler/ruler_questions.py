"""RULER's question answering over documents, with a data set of the user: SQuAD or HotpotQA."""

import random
from typing import Any, NamedTuple

from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.foreign_files import read_json_file
from jaxlc.core.paths import local_path
from jaxlc.evals.example import Example

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


def required(questions: Questions | None, task: str) -> Questions:
    """Raises UserError without questions."""
    if questions is None:
        raise UserError(f"task {task} needs {_SOURCES[task]}")
    return questions


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
        texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]] for item in data]
        documents = sorted({text for item_texts in texts for text in item_texts})
        index = {document: i for i, document in enumerate(documents)}
        questions = [
            Question(item["question"], (item["answer"],), tuple(index[text] for text in item_texts), ())
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


def question(data: Questions, texts: tuple[str, str], index: int, size: int, rng: random.Random) -> Example:
    """Question `index` over `size` documents, besides those that contain the answer."""
    template, prefix = texts
    asked = data.questions[index % len(data.questions)]
    related = list(asked.related)
    rng.shuffle(related)
    known = {*asked.needed, *related}
    others = [i for i in range(len(data.documents)) if i not in known] if size > len(related) else []
    rng.shuffle(others)
    repeats = -(-max(0, size - len(related)) // len(others)) if others else 0
    chosen = [*asked.needed, *(related + others * repeats)[:size]]
    rng.shuffle(chosen)
    context = "\n\n".join(f"Document {number}:\n{data.documents[i]}" for number, i in enumerate(chosen, 1))
    return Example(
        prompt=template.format(context=context, query=asked.text), answer_prefix=prefix, references=asked.answers
    )
