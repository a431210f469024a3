"""RULER's tasks: exact lengths for any tokenizer, published settings, answers that are in the
prompt.
"""

import json
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jaxlc.config.schema import RULER_TASKS
from jaxlc.core.errors import UserError
from jaxlc.evals import haystack, ruler
from jaxlc.evals.evaluate_run import NEW_TOKENS, needle_example, passkey_example
from jaxlc.evals.haystack import prose_of, sentences_of
from jaxlc.evals.ruler import read_hotpotqa, read_squad

LENGTHS = (2048, 16_384)


def _trained(model, trainer, pre_tokenizer=None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator([" ".join(prose_of(()).words[:5000])], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def count_functions():
    """Tokens of a text: bytes, byte-level BPE, and a Unigram model with a marker for spaces as
    SentencePiece has.
    """
    bpe = _trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=700,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    unigram = _trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=600, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
        pre_tokenizers.Metaspace(),
    )
    return dict(
        bytes=lambda text: len(text.encode()),
        bpe=lambda text: len(bpe.encode(text).ids),
        unigram=lambda text: len(unigram.encode(text).ids),
    )


@pytest.fixture(scope="module")
def materials(tmp_path_factory):
    directory = tmp_path_factory.mktemp("questions")

    def paragraph(i: int) -> dict:
        answer = dict(
            question=f"Which fact is {i}?", is_impossible=i == 3, answers=[dict(text=f"Fact {i}")]
        )
        return dict(context=f"Fact {i}. " + "Text. " * 40, qas=[answer])

    def item(i: int) -> dict:
        context = [
            [f"Title {i}", [f"The answer is Answer {i}. ", "More. " * 50]],
            ["Other", ["Text."]],
        ]
        return dict(question=f"What is {i}?", answer=f"Answer {i}", context=context)

    paragraphs = [paragraph(i) for i in range(30)]
    squad = dict(data=[dict(paragraphs=paragraphs[:20]), dict(paragraphs=paragraphs[20:])])
    hotpotqa = [item(i) for i in range(9)]
    (directory / "squad.json").write_text(json.dumps(squad))
    (directory / "hotpotqa.json").write_text(json.dumps(hotpotqa))
    return ruler.Materials(
        prose_of(()),
        read_squad(directory / "squad.json"),
        read_hotpotqa(directory / "hotpotqa.json"),
    )


@pytest.mark.parametrize("name", ruler.TASKS)
def test_examples_fill_the_length_and_never_exceed_it(name, count_functions, materials):
    task = ruler.TASKS[name]
    for tokenizer, count in count_functions.items():
        for length in LENGTHS:
            example = ruler.example(name, 0, length, count, materials)
            num_tokens = count(example.text) + task.new_tokens
            assert 0.8 * length <= num_tokens <= length, (tokenizer, length)
            assert example == ruler.example(name, 0, length, count, materials)
            assert example != ruler.example(name, 1, length, count, materials)
            for reference in example.references:
                assert reference in example.prompt, reference


def test_settings_are_those_of_the_published_configuration():
    """scripts/synthetic.yaml and scripts/data/synthetic/constants.py of NVIDIA/RULER at c3f5e3b."""
    assert tuple(ruler.TASKS) == RULER_TASKS
    niah = {name: task for name, task in ruler.TASKS.items() if task.kind == "niah"}
    names = (
        "type_haystack",
        "type_needle_k",
        "type_needle_v",
        "num_needle_k",
        "num_needle_v",
        "num_needle_q",
    )
    assert {name: tuple(task.settings[key] for key in names) for name, task in niah.items()} == {
        "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
        "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
        "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
        "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
        "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
        "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
        "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
        "niah_multiquery": ("essay", "words", "numbers", 1, 1, 4),
    }
    assert {name: task.settings for name, task in ruler.TASKS.items() if name not in niah} == {
        "vt": dict(num_hops=4),  # type_haystack is noise, num_chains 1: as `variables` makes them
        "cwe": dict(freq_cw=30, freq_ucw=3, num_cw=10),
        "fwe": dict(alpha=2.0),
        "qa_1": dict(dataset="squad"),
        "qa_2": dict(dataset="hotpotqa"),
    }
    new_tokens = {task.kind: task.new_tokens for task in ruler.TASKS.values()}
    assert new_tokens == dict(
        niah=128, variable_tracking=30, common_words_extraction=120, freq_words_extraction=50, qa=32
    )


def test_answers_follow_from_the_prompts(count_functions, materials):
    count = count_functions["bytes"]
    vt = ruler.example("vt", 0, 4096, count, materials)
    question = vt.prompt[vt.prompt.rindex("Memorize and track") :]
    value = re.search(r"assigned the value (\d+)", question).group(1)
    held = {name for name, number in re.findall(r"VAR (\w+) = (\d+)", question) if number == value}
    for _ in range(5):
        held |= {
            target
            for target, source in re.findall(r"VAR (\w+) = VAR (\w+)", question)
            if source in held
        }
    assert held == set(vt.references) and len(held) == 5

    for name, pattern in (("cwe", r"\d+\. (\S+)"), ("fwe", r"\b([a-z]{6})\b")):
        example = ruler.example(name, 0, 16_384, count, materials)
        words = re.findall(
            pattern, example.prompt.rsplit("Below is", 1)[-1].rsplit("Question", 1)[0]
        )
        common, counts = np.unique(words, return_counts=True)
        top = common[np.argsort(-counts)[: len(example.references)]]
        assert set(top) == set(example.references)


@pytest.mark.parametrize(
    ("pattern", "num_lines"),
    [(r"\w+|[^\w\s]", [17, 145]), (r"\w{1,3}|[^\w\s]|\n", [11, 103]), (".|\n", [5, 31])],
)
def test_noise_of_variable_tracking_equals_that_of_the_published_script(
    pattern, num_lines, materials
):
    """Lines of noise in the solved example, which has 500 tokens, and in the question. The first
    two are those that scripts/data/synthetic/variable_tracking.py of NVIDIA/RULER at c3f5e3b writes
    with these tokens; with the last ones, 5 lines exceed 500 tokens, and that script does not end.
    BOS or a chat template do not count."""
    counts = [lambda text, extra=extra: len(re.findall(pattern, text)) + extra for extra in (0, 30)]
    for length, count in zip((4096, 4126), counts):
        example = ruler.example("vt", 0, length, count, materials)
        parts = example.prompt.split("Memorize and track")[1:]
        assert [part.count("The grass is green") for part in parts] == num_lines


def test_multikey_text_has_the_needles_at_different_depths(count_functions, materials):
    depths = [
        ruler.example("niah_single_2", i, 4096, count_functions["bytes"], materials).depth for i in range(12)
    ]  # fmt: skip
    assert max(depths) - min(depths) > 0.4


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_passkey_is_at_its_depth_of_an_exact_length(depth, count_functions):
    for count in count_functions.values():
        examples = [passkey_example(4096, depth, index, count) for index in range(2)]
        assert examples[0].references != examples[1].references and examples[0] == passkey_example(
            4096, depth, 0, count
        )
        (key,) = examples[0].references
        assert len(key) == 5 and examples[0].prompt.count(key) == 2
        assert 0.95 * 4096 <= count(examples[0].text) + NEW_TOKENS <= 4096
        assert abs(examples[0].prompt.index(key) / len(examples[0].prompt) - depth) < 0.06


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_is_at_its_depth_of_an_exact_length(depth, count_functions, materials):
    for count in count_functions.values():
        example = needle_example(4096, depth, 0, count, materials.prose, num_needles=4)
        assert 0.97 * 4096 <= count(example.text) + NEW_TOKENS <= 4096
        at = example.prompt.index(example.references[0]) / len(example.prompt)
        assert abs(at - depth) < 0.06, at


def test_length_too_small_for_a_task_raises(count_functions, materials):
    message = (
        r"invalid length 300 for the task niah_single_1, .* its answer 128: use \d{3,} or more"
    )
    with pytest.raises(UserError, match=message) as error:
        ruler.example("niah_single_1", 0, 300, count_functions["bytes"], materials)
    length = int(str(error.value).split()[-3])
    assert ruler.example("niah_single_1", 0, length, count_functions["bytes"], materials).references


def test_question_task_without_its_data_set_raises(materials, count_functions):
    with pytest.raises(UserError, match="qa_1 needs the SQuAD 2.0 file"):
        ruler.example("qa_1", 0, 4096, count_functions["bytes"], ruler.Materials(materials.prose))


def test_sentences_are_split_at_capital_letters():
    assert sentences_of('One e.g. this. Two? "Three!" said he. (Four.)') == [
        "One e.g. this.", "Two?", '"Three!" said he.', "(Four.)",
    ]  # fmt: skip


def test_python_without_its_sources_needs_files_for_the_haystack(monkeypatch):
    """As of distributions that strip the standard library."""
    monkeypatch.setattr(haystack, "_docstring_words", tuple)
    with pytest.raises(UserError, match="no sources of its standard library.*: use files"):
        prose_of(())
