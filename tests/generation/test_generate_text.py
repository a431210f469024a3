"""jaxlc.generate and the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlc
from jaxlc.cli import main_of
from jaxlc.core.errors import UserError
from jaxlc.generation import generate_text
from jaxlc.step.step import TrainStep
from tests.train import runs

main = main_of("generate")

PROMPT = "the first line of the text"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    jax.devices()  # the simulated devices of the tests, before a function starts JAX
    return runs.write_untrained_run(tmp_path_factory.mktemp("run"))


def test_generate_from_path_and_from_result_agree_and_stream(run):
    result, streamed = jaxlc.load(run), []
    generation = jaxlc.generate(
        result, PROMPT, max_tokens=9, stream=lambda index, text: streamed.append((index, text))
    )
    assert generation.num_prompt_tokens == len(PROMPT) and generation.finish_reason in (
        "length",
        "stop",
    )
    assert "".join(text for _, text in streamed) == generation.text and {
        index for index, _ in streamed
    } <= {0}
    ids = np.frombuffer(PROMPT.encode(), np.uint8)
    (from_ids,) = jaxlc.generate(run, [ids], max_tokens=9, mesh=dict(context=4))
    np.testing.assert_array_equal(from_ids.tokens, generation.tokens)
    with pytest.raises(
        UserError,
        match="step, mesh and adapter have no effect with a Result: pass them to jaxlc.load",
    ):
        jaxlc.generate(result, PROMPT, mesh=dict(context=4))


def test_command_prints_the_text_and_one_line_about_errors(run, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    assert (
        main(
            [
                "generate",
                str(run),
                f"--prompt_file={tmp_path}/prompt.txt",
                "--max_tokens=3",
                "--seed=1",
            ]
        )
        == 0
    )
    captured = capsys.readouterr()
    assert f"prompt {len(PROMPT)} tokens, new 3 tokens, ended by length" in captured.err
    assert main(["generate", str(tmp_path / "none"), "--prompt=a"]) == 2
    assert main(["generate", str(run), "--prompt_file=/none"]) == 2
    assert main(["generate", str(run), "--prompt=a", "--mesh=context=x"]) == 2
    assert main(["generate", str(run), "--prompt=a", "--chat"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and all(line.startswith("error: ") for line in errors)
    assert errors[-1].endswith(
        "has no chat template, which chats need: set --chat_template to chatml, llama3 or a Jinja file"
    )
    chat = ["--prompt=a", "--max_tokens=1", "--chat_template=chatml"]
    assert main(["generate", str(run), *chat]) == 2
    assert "chat_template='chatml' has no effect without chat" in capsys.readouterr().err
    assert main(["generate", str(run), *chat, "--chat"]) == 0
    prompt = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert f"prompt {len(prompt)} tokens" in capsys.readouterr().err


def test_stops_of_a_run_have_those_of_the_copy_of_its_original_model(run):
    result = jaxlc.load(run)
    assert generate_text.stops_for(result).ids == [256]
    (run / "pretrained").mkdir()
    (run / "pretrained" / "config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert generate_text.stops_for(result).ids == [256, 7, 9]
    (run / "pretrained" / "config.json").unlink()


def test_prompts_that_are_one_array_raise(run):
    with pytest.raises(UserError, match="a list of strings or of arrays"):
        jaxlc.generate(run, np.arange(4))


def test_generation_from_a_path_frees_float32_parameters(run, monkeypatch):
    """Those that the generator has in bfloat16, before it allocates the cache."""
    monkeypatch.setattr(TrainStep, "compute_dtype", jnp.dtype(jnp.bfloat16))
    result = jaxlc.load(run)
    monkeypatch.setattr("jaxlc.api.load", lambda *_, **__: result)
    generation = jaxlc.generate(run, PROMPT, max_tokens=2)
    assert len(generation.tokens) == 2
    used = generate_text.generator_of(result).params
    freed = jax.tree.map(
        lambda stored, cast: (stored.is_deleted(), cast.dtype == jnp.bfloat16), result.params, used
    )
    pairs = jax.tree.leaves(freed, is_leaf=lambda x: isinstance(x, tuple))
    assert all(is_freed == is_cast for is_freed, is_cast in pairs) and len(set(pairs)) == 2
