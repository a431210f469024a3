"""Scores of lm-evaluation-harness with the model `jaxlc` against its model `hf`, on three tasks
over local files.

Runs in the environment of `make test-transformers`, which has lm_eval, transformers and jaxlc.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs lm_eval: run make test-transformers")
os.environ |= dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
import torch  # noqa: E402
import transformers  # noqa: E402
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import jaxlc  # noqa: E402
from jaxlc.core.errors import UserError  # noqa: E402
from jaxlc.evals import harness  # noqa: E402
from jaxlc.evals.harness import HarnessModel  # noqa: E402
from tests.data.chat_styles import CHATML, write_tokenizer  # noqa: E402
from tests.generation.test_prompts import add_bos_processor  # noqa: E402

CONTEXT = 64  # of the base model
TRAINED = 128
TEXT = "the old lighthouse keeper counts seven ships before the storm comes in from the east and closes his book"
WORDS = TEXT.split()
# Every kind of request: loglikelihood, loglikelihood_rolling (longer than the context),
# generate_until.
TASKS = {
    "choices": dict(
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{label}}",
        num_fewshot=2,
        metric_list=[dict(metric="acc"), dict(metric="acc_norm")],
    ),
    "perplexity": dict(
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[dict(metric="word_perplexity"), dict(metric="bits_per_byte")],
    ),
    "answers": dict(
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{text}}",
        generation_kwargs=dict(until=["\n\n", "q", "<|im_end|>"], max_gen_toks=12),
        metric_list=[dict(metric="exact_match")],
    ),
}


def documents() -> list[dict]:
    rng = np.random.default_rng(0)

    def text(num_words: int) -> str:
        return " ".join(rng.choice(WORDS, num_words))

    return [
        dict(
            question=text(rng.integers(3, 12)),
            # Answers of one token share an input; the others differ in length.
            choices=[" a", " b", " c"] if index % 2 else [" " + text(n) for n in (1, 3, 5)],
            label=index % 3,
            text=text(rng.integers(1, 60)),
        )
        for index in range(7)
    ]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict:
    """Arguments of `simple_evaluate` for the tasks."""
    directory = tmp_path_factory.mktemp("tasks")
    (directory / "documents.jsonl").write_text("".join(json.dumps(x) + "\n" for x in documents()))
    files = dict(test=str(directory / "documents.jsonl"))
    for name, task in TASKS.items():
        source = dict(
            task=name, dataset_path="json", dataset_kwargs=dict(data_files=files), test_split="test"
        )
        if "num_fewshot" in task:
            source["fewshot_split"] = "test"
        (directory / f"{name}.yaml").write_text(json.dumps(source | task))  # JSON is YAML
    manager = TaskManager(include_path=str(directory), include_defaults=False)
    return dict(tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A base model, a run that extends its context with YaRN, and the exported run."""
    root = tmp_path_factory.mktemp("models")
    base = root / "base"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    write_tokenizer(base)
    add_bos_processor(base)
    (root / "text.txt").write_text(f"{TEXT}\n" * 200)
    settings = jaxlc.config.defaults()
    for name, value in {
        "model.init_from": str(base), "model.rope.scaling": "yarn", "model.rope.factor": 2.0,
        "model.rope.original_tokens": CONTEXT, "data.sources": (str(root / "text.txt"),),
        "data.eval_fraction": 0.1, "data.seq_len": TRAINED, "train.steps": 2, "train.global_batch_size": 2,
        "precision.compute": "fp32", "mesh.fsdp": 2, "mesh.context": 4, "train.eval_sequences": 2,
    }.items():  # fmt: skip
        settings.update_from_flattened_dict({name: value})
    jaxlc.train.run(settings, workdir=root / "run")
    jaxlc.export(root / "run", root / "export", dtype="fp32")
    return dict(base=base, run=root / "run", export=root / "export")


def outcome(results: dict) -> tuple[dict, list]:
    """Scores by task and metric, and the responses of the model to each request."""
    scores = {
        (task, metric): value
        for task, values in results["results"].items()
        for metric, value in values.items()
        if isinstance(value, float) and "stderr" not in metric
    }
    responses = [sample["filtered_resps"] for task in TASKS for sample in results["samples"][task]]
    return scores, responses


@pytest.fixture(scope="module")
def expected(models, tasks) -> tuple[dict, list]:
    """With the model `hf` on the exported directory."""
    arguments = dict(pretrained=str(models["export"]), dtype="float32", device="cpu")
    return outcome(simple_evaluate("hf", model_args=arguments, batch_size=1, **tasks))


def assert_responses_equal(responses: list, expected: list) -> None:
    for response, wanted in zip(responses, expected, strict=True):
        if isinstance(wanted[0], str):
            assert response == wanted
        else:
            np.testing.assert_allclose(
                np.array(response, float), np.array(wanted, float), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("run", dict(batch_size=3)),
        ("export", dict(batch_size=1)),
        ("export", dict(batch_size=2, context=2, fsdp=2)),
    ],
)
def test_scores_equal_those_of_hf(source, arguments, models, tasks, expected):
    model = HarnessModel(models[source], **arguments)
    assert model.max_length == TRAINED
    scores, responses = outcome(simple_evaluate(model, **tasks))
    expected_scores, expected_responses = expected
    assert scores.keys() == expected_scores.keys() and len(scores) == 5
    for name, value in expected_scores.items():
        assert scores[name] == pytest.approx(value, rel=1e-5), name
    assert_responses_equal(responses, expected_responses)
    texts = [x[0] for x in expected_responses if isinstance(x[0], str)]
    assert len(set(texts)) > 2 and {len(text) for text in texts} != {0}


def test_chats_equal_those_of_hf(models, tasks):
    """Examples as messages, a template with tags around answers; the last message is continued for
    each choice.
    """
    config = models["export"] / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(chat_template=CHATML)))
    arguments = tasks | dict(
        tasks=["choices", "answers"], apply_chat_template=True, fewshot_as_multiturn=True
    )
    hf = HFLM(pretrained=str(models["export"]), dtype="float32", device="cpu", batch_size=1)
    model = HarnessModel(models["export"])
    messages = [dict(role="user", content="a b"), dict(role="assistant", content="The answer: ")]
    assert model.apply_chat_template(messages, False) == hf.apply_chat_template(messages, False)
    assert model.chat_template(True) == hf.chat_template(True)
    ours, theirs = (simple_evaluate(x, **arguments) for x in (model, hf))
    for task in arguments["tasks"]:
        for sample, expected in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert sample["arguments"] == expected["arguments"]
            assert_responses_equal([sample["filtered_resps"]], [expected["filtered_resps"]])
    with pytest.raises(
        UserError, match="pass it without a value, and chat_template=chatml in --model_args"
    ):
        model.chat_template("chatml")


def test_command_prints_the_scores_and_invalid_arguments_are_named(
    models, tasks, monkeypatch, capsys, tmp_path
):
    arguments = [
        "--tasks",
        "choices",
        "--include_path",
        str(tasks["task_manager"].include_path),
        "--batch_size",
        "2",
    ]
    monkeypatch.setattr("sys.argv", [])
    assert (
        harness.main(
            ["harness", "--model_args", f"path={models['export']},max_length={CONTEXT}", *arguments]
        )
        == 0
    )
    assert "|choices|" in capsys.readouterr().out
    assert (
        harness.main(["harness", "--model_args", f"path={models['export']},contexts=2", *arguments])
        == 2
    )
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: unknown argument 'contexts' of the model: expected path, step, max_length, chat_template, seed, data,"
        " fsdp, context, tensor"
    )
    model = HarnessModel(models["export"], max_length=8)
    with pytest.raises(UserError, match="the task generates 12 tokens, and max_length is 8"):
        simple_evaluate(model, **tasks | dict(tasks=["answers"]))
    with pytest.raises(UserError, match="a continuation has .* tokens, and max_length is 2"):
        simple_evaluate(
            HarnessModel(models["export"], max_length=2), **tasks | dict(tasks=["choices"])
        )


def samples(model, prompt: str = "the old", count: int = 6, **settings) -> list[str]:
    """The texts of equal requests, as of a task with repeats."""
    settings = dict(until=[], max_gen_toks=8, do_sample=True, temperature=1.0) | settings
    request = Instance("generate_until", dict(), (prompt, settings), 0)
    return model.generate_until([request] * count)


def test_samples_differ_by_request_and_seed_and_not_by_batch_size(models):
    small, large = (HarnessModel(models["export"], batch_size=size, seed=3) for size in (2, 8))
    texts = samples(small)
    assert samples(large) == samples(small) == texts and len(set(texts)) > 3
    assert samples(HarnessModel(models["export"], seed="3")) == texts  # as --model_args passes it
    seeded = samples(large, seed=4)
    assert seeded == samples(small, seed=4) != texts
    torch.manual_seed(4)  # what --seed of lm_eval does
    assert samples(HarnessModel(models["export"])) == seeded
    assert set(samples(small, temperature=0.0, do_sample=False)) == {
        samples(large, temperature=0.0)[0]
    }


def test_continuation_without_tokens_raises_and_context_without_tokens_follows_the_prefix_token(
    models,
):
    model = HarnessModel(models["export"])
    with pytest.raises(UserError, match=r"the continuation 'e' of 'th' has no token of its own"):
        model._loglikelihood_tokens([(("th", "e"), [3, 4], [])])
    ids = model.tok_encode(" the old", add_special_tokens=False)
    without_context, expected = model._loglikelihood_tokens(
        [((" ", "the old"), [], ids), (("", " the old"), [model.prefix_token_id], ids)]
    )
    assert without_context == expected


def test_other_processes_report_nothing(models, tasks, monkeypatch):
    """They make the same requests, since each is a part of one computation."""
    monkeypatch.setattr("jax.process_index", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    model = HarnessModel(models["export"])
    lengths = []
    score = model._loglikelihood_tokens
    monkeypatch.setattr(
        model,
        "_loglikelihood_tokens",
        lambda requests, **_: lengths.append(len(requests)) or score(requests),
    )
    assert simple_evaluate(model, **tasks | dict(tasks=["choices"])) is None
    assert lengths == [3 * len(documents())]
