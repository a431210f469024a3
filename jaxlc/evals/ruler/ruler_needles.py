"""RULER's needles in a haystack and variable tracking."""

import bisect
import random
import string
import uuid

from jaxlc.evals.example import CountTokens, Example
from jaxlc.evals.materials import Prose, compound_words, sentences_of

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
_NUM_DEPTHS = 40  # equidistant depths at which needles are inserted into prose
_WORDS_PER_SIZE = 20  # words of prose; other haystacks have one line per size
_SOLVED_TOKENS, _MIN_SOLVED_LINES = 500, 5  # the solved example of variable tracking


def needles(settings: dict, texts: tuple[str, str], prose: Prose, size: int, rng: random.Random) -> Example:
    """Questions about sentences that are hidden in a text; `settings` as in RULER's synthetic.yaml."""
    key_kind, value_kind = settings["type_needle_k"], settings["type_needle_v"]
    num_queries = settings["num_needle_q"]
    num_keys = max(settings["num_needle_k"], num_queries)
    keys = [_random(key_kind, rng) for _ in range(num_keys)]
    values = [[_random(value_kind, rng) for _ in range(settings["num_needle_v"])] for _ in keys]
    chosen = rng.sample(range(num_keys), num_queries)
    hidden = [
        _NEEDLE.format(type_needle_v=value_kind, key=key, value=value)
        for key, key_values in zip(keys, values)
        for value in key_values
    ]
    rng.shuffle(hidden)

    if settings["type_haystack"] == "essay":
        context = _in_prose(hidden, prose, size, rng)
    else:
        lines = [_NOISE] * size
        if settings["type_haystack"] == "needle":
            lines = [
                _NEEDLE.format(type_needle_v=value_kind, key=_random(key_kind, rng), value=_random(value_kind, rng))
                for _ in lines
            ]
        for at, text in zip(sorted(rng.sample(range(size + 1), len(hidden)), reverse=True), hidden):
            lines.insert(at, text)
        context = "\n".join(lines)

    template, prefix = texts
    if num_queries * settings["num_needle_v"] == 1:
        template, prefix = (_singular(text) for text in texts)
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


def _singular(text: str) -> str:
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is").replace("answers", "answer")


def _random(kind: str, rng: random.Random) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return rng.choice(compound_words())
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _in_prose(hidden: list[str], prose: Prose, size: int, rng: random.Random) -> str:
    sentences = sentences_of(" ".join(prose.first(size * _WORDS_PER_SIZE)))
    depths = [round(100 * i / (_NUM_DEPTHS - 1)) / 100 for i in range(_NUM_DEPTHS)]
    places = sorted(int(len(sentences) * depth) for depth in rng.sample(depths, len(hidden)))
    for place, text in zip(reversed(places), reversed(hidden), strict=True):
        sentences.insert(place, text)
    return " ".join(sentences)


def variables(settings: dict, texts: tuple[str, str], solved_lines: int, size: int, rng: random.Random) -> Example:
    """Chains of assignments: which variables have a value? One solved example comes first.

    Args:
      solved_lines: lines of noise in the solved example, see `lines_of_solved_example`.
      size: lines of noise in the question.
    """
    question, start, names = _chains(settings, texts, solved_lines, 3, rng)
    solved = f"{question}{start} {' '.join(names)}\n\n"
    question, start, names = _chains(settings, texts, size, 5, rng)
    return Example(prompt=solved + question, answer_prefix=start, references=names)


def lines_of_solved_example(
    settings: dict, texts: tuple[str, str], count_tokens: CountTokens, rng: random.Random
) -> int:
    """The lines of noise in the solved example of `variables`, as scripts/data/synthetic/variable_tracking.py of
    NVIDIA/RULER chooses them: as many as 500 tokens allow, without the solution, and at least 5."""
    extra_tokens = count_tokens("")  # from the chat template or BOS, which the solved example does not have

    def num_tokens(num_lines: int) -> int:
        return count_tokens("".join(_chains(settings, texts, num_lines, 3, rng)[:2])) - extra_tokens

    sizes = range(_MIN_SOLVED_LINES + 1, _SOLVED_TOKENS)
    return _MIN_SOLVED_LINES + bisect.bisect_right(sizes, _SOLVED_TOKENS, key=num_tokens)


def _chains(
    settings: dict, texts: tuple[str, str], num_lines: int, name_length: int, rng: random.Random
) -> tuple[str, str, tuple[str, ...]]:
    """(question, start of the answer, names that have the value) of a text with `num_lines` lines of noise."""
    template, prefix = texts
    num_hops = settings["num_hops"]
    lines, chains = [_NOISE] * num_lines, []
    for _ in range(settings["num_chains"]):
        names = _names(num_hops + 1, name_length, rng)
        value = str(rng.randrange(10_000, 99_999))
        chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:]))]
        for offset, (place, text) in enumerate(zip(sorted(rng.sample(range(num_lines), len(chain))), chain)):
            lines.insert(place + offset, text)
        chains.append((names, value))
    names, value = chains[0]
    context = "\n".join(lines).replace(". \n", ".\n")
    return template.format(context=context, query=value), prefix.format(num_v=num_hops + 1, query=value), tuple(names)


def _names(count: int, length: int, rng: random.Random) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        name = "".join(rng.choices(string.ascii_uppercase, k=length))
        if name not in names:
            names.append(name)
    return names
