"""Greedy text against `transformers`, for the models of tests/hf/models.py: prompts longer than
their windows.

Also logits and first tokens of RoPE that depends on the length of a text, and chats after training
on them and export.
"""

import json
import math

import numpy as np
import pytest

import jaxlc
from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.generation.generator import Generator
from tests.hf.comparison import (
    MESHES,
    config_of,
    needs_transformers,
    relative_error,
    run_jobs,
    step_of,
    tokens_of,
)
from tests.hf.models import CASES, write_model, write_tokenizer

pytestmark = needs_transformers
PROMPT_TOKENS, NEW_TOKENS = (90, 7), 24  # a batch of unequal lengths
# between the two largest logits: the next token of a smaller gap depends on rounding
MIN_GAP = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    # transformers does not bound the steps of decoded tokens
    unbounded = dict(time_step_limit=[0.0, math.inf])
    changes = {case: unbounded for case, x in CASES.items() if "time_step_limit" in x.config}
    return {
        case: write_model(root / case, case, dtype=np.float32, **changes.get(case, {}))
        for case in CASES
    }


@pytest.fixture(scope="module")
def references(models, tmp_path_factory):
    prompt = tokens_of(PROMPT_TOKENS[0])[0].tolist()
    jobs = {
        (case, length): dict(
            job="generate", directory=str(directory), prompt=prompt[:length], num_tokens=NEW_TOKENS
        )
        for case, directory in models.items()
        for length in PROMPT_TOKENS
    }
    return run_jobs(tmp_path_factory.mktemp("references"), jobs)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(case, mesh, models, references):
    """Up to the first token whose two largest logits are nearly equal, with the settings of a text
    of this length.
    """
    step = step_of(models[case], 128, MESHES[mesh])
    params, _ = load_pretrained(step)
    generator = Generator(step, params, ByteTokenizer(), is_pretrained=True)
    prompt = tokens_of(PROMPT_TOKENS[0])[0]
    generations = generator(
        [prompt[:length] for length in PROMPT_TOKENS], max_tokens=NEW_TOKENS, chunk_tokens=32
    )
    for generation, length in zip(generations, PROMPT_TOKENS, strict=True):
        expected, gaps = (
            references[case, length]["tokens"][length:],
            references[case, length]["gaps"],
        )
        num_compared = int(np.argmax(gaps < MIN_GAP)) if (gaps < MIN_GAP).any() else NEW_TOKENS
        assert num_compared >= NEW_TOKENS // 2, gaps
        np.testing.assert_array_equal(generation.tokens[:num_compared], expected[:num_compared])


LENGTHS = (40, 64, 100, 165, 240)
ROPES = {  # with an original length of 64 tokens
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "longrope": dict(
        rope_type="longrope",
        original_max_position_embeddings=64,
        short_factor=[1 + i / 8 for i in range(8)],
        long_factor=[1.0 + i for i in range(8)],
    ),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("length")
    return {
        name: write_model(
            root / name, "qwen3", dtype=np.float32, rope_parameters=dict(rope, rope_theta=4e4)
        )
        for name, rope in ROPES.items()
    }


@pytest.fixture(scope="module")
def logits_by_length(directories, tmp_path_factory):
    jobs = {
        (name, length): dict(
            job="gradients", directory=str(directory), tokens=tokens_of(length)[:1].tolist()
        )
        for name, directory in directories.items()
        for length in LENGTHS
    }
    results = run_jobs(tmp_path_factory.mktemp("references"), jobs)
    return {key: result["logits"][0] for key, result in results.items()}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ROPES)
def test_rope_of_a_directory_follows_the_length_of_each_text(
    name, mesh, directories, logits_by_length
):
    """Logits, and first tokens of one batch of prompts of different lengths."""
    loaded = jaxlc.load(directories[name], mesh=MESHES[mesh])
    prompts = [tokens_of(length)[0] for length in LENGTHS]
    generations = jaxlc.generate(loaded, prompts, max_tokens=2)
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = logits_by_length[name, len(prompt)]
        assert relative_error(loaded.model.logits(prompt), expected) <= 1e-4, len(prompt)
        assert generation.tokens[0] == expected[-1].argmax(), len(prompt)


QUESTION, ANSWER = "how many", "there are 12"
# Special tokens of the tokenizer, whose markers the template of that name needs.
TEMPLATES = dict(
    chatml=("<|im_start|>", "<|im_end|>"),
    llama3=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)


def write_base(directory, template):
    """A base model without template and generation settings, or one with both for llama3."""
    write_model(directory, "llama", dtype=np.float32)
    write_tokenizer(directory, 60, ("<unk>", "<s>", "</s>", *TEMPLATES[template]))
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=32,
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").unlink()
    (directory / "chat_template.jinja").unlink()
    if template == "llama3":
        (directory / "chat_template.jinja").write_text(
            "{% for x in messages %}{{ x.content }}</s>{% endfor %}"
        )
        (directory / "generation_config.json").write_text(
            json.dumps(dict(temperature=0.6, top_p=0.9, do_sample=True))
        )
    return directory


def test_chats_after_export_stop_at_the_end_of_turn_as_in_transformers(tmp_path):
    """A base model learns one chat by heart, and transformers' pipeline gives the answer after the
    export.
    """
    messages = [dict(role="user", content=QUESTION), dict(role="assistant", content=ANSWER)]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(dict(messages=messages))}\n" * 200)
    outs = {}
    for template in TEMPLATES:
        config = config_of(
            write_base(tmp_path / template, template), 128, MESHES["context=4 x tensor=2"]
        )
        config.data.update(
            chat_template=template, cache_dir=str(tmp_path / "cache"), eval_fraction=0.2
        )
        config.data.mixture = dict(
            chats=dict(paths=str(tmp_path / "chats.jsonl"), chat_field="messages")
        )
        config.optimizer = dict(learning_rate=1e-2, warmup_steps=2)
        config.train.update(steps=60, eval_every_steps=0)
        jaxlc.train.run(config, tmp_path / f"run-{template}")
        outs[template] = jaxlc.export(
            tmp_path / f"run-{template}", tmp_path / f"out-{template}", dtype="fp32"
        )
    jobs = {
        x: dict(job="chat", directory=str(outs[x]), message=QUESTION, num_tokens=40)
        for x in TEMPLATES
    }
    references = run_jobs(tmp_path, jobs)
    for template, reference in references.items():
        assert str(reference["text"]).replace(" ", "") == ANSWER.replace(" ", "")
        assert reference["lengths"].tolist() == [128, 128]
        for source in (outs[template], tmp_path / f"run-{template}"):
            generation = jaxlc.generate(source, QUESTION, max_tokens=40, chat=True)
            assert generation.finish_reason == "stop"
            np.testing.assert_array_equal(generation.tokens, reference["tokens"])
    assert np.isclose(references["llama3"]["temperature"], 0.6)
