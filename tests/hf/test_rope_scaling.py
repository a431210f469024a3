"""RoPE against `transformers`: frequencies of every kind of scaling, and logits and gradients of
extended models.

Needs JAXLC_TRANSFORMERS_PYTHON, as tests/hf/test_transformers.py.
"""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config import load
from jaxlc.config.models.config_json import config_json_of
from jaxlc.config.models.families import FAMILIES
from jaxlc.config.models.model_schema import model_from
from jaxlc.config.models.rope_json import max_position_embeddings, rope_fields, rope_settings
from jaxlc.models.rope import rope_frequencies
from tests.hf.comparison import (
    MESHES,
    ORIGINAL_TOKENS,
    PYTHON,
    assert_small,
    errors_of,
    needs_transformers,
    run_jobs,
    step_of,
    tokens_of,
)
from tests.hf.models import write_model
from tests.models.plain_rope import LLAMA, SCALINGS, scaled_model

pytestmark = needs_transformers
# below and 4 times beyond the original context
LENGTHS = (ORIGINAL_TOKENS // 2, 4 * ORIGINAL_TOKENS)
# Kind -> settings of a model with head_dim=16 that was trained with ORIGINAL_TOKENS.
EXTENSIONS = {
    "linear": dict(rope_scaling="linear", rope_scaling_factor=4.0),
    "ntk": dict(rope_scaling="ntk", rope_scaling_factor=4.0),
    "dynamic_ntk": dict(rope_scaling="dynamic_ntk", rope_scaling_factor=4.0),
    "yarn": dict(rope_scaling="yarn", rope_scaling_factor=4.0),
    "yarn_options": dict(
        rope_scaling="yarn",
        rope_scaling_factor=4.0,
        rope_scaling_beta_fast=4.0,
        rope_scaling_beta_slow=0.5,
        rope_scaling_truncate=False,
        rope_scaling_attention_factor=1.5,
    ),
    "longrope": dict(
        rope_scaling="longrope",
        rope_scaling_factor=4.0,
        rope_scaling_short_factors=tuple(1 + i / 8 for i in range(8)),
        rope_scaling_long_factors=tuple(1 + i for i in range(8)),
    ),
}
CHANGES_WITH_LENGTH = ("dynamic_ntk", "longrope")
_YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=4096)
_LLAMA3 = dict(_YARN, rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
_LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1 + i / 64 for i in range(64)],
    long_factor=[1 + i / 2 for i in range(64)],
)
# rope_parameters, and fields outside of them.
CORNER_CASES = {
    "yarn, length outside": (_YARN, dict(original_max_position_embeddings=65_536)),
    "llama3, length outside": (_LLAMA3, dict(original_max_position_embeddings=65_536)),
    "longrope, length outside": (
        dict(_LONGROPE, original_max_position_embeddings=65_536, factor=4.0),
        dict(original_max_position_embeddings=2048),
    ),
    "longrope, maximum below the original length": (
        dict(_LONGROPE, original_max_position_embeddings=8192),
        dict(max_position_embeddings=2048),
    ),
    "linear, factor 1": (dict(rope_type="linear", factor=1.0), {}),
    "yarn, factor 1": (dict(_YARN, factor=1.0), {}),
    "yarn, factor 1 and an attention factor": (dict(_YARN, factor=1.0, attention_factor=1.3), {}),
    "llama3, factor 1": (dict(_LLAMA3, factor=1.0), {}),
    "yarn, no original length": (dict(rope_type="yarn", factor=8.0), {}),
    "llama3, no original length": (
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        dict(max_position_embeddings=4096),
    ),
    "longrope, no original length": (
        dict(_LONGROPE, factor=4.0),
        dict(max_position_embeddings=4096),
    ),
    "linear, base": (dict(rope_type="linear", factor=2.0, rope_theta=70_000.0), {}),
    "yarn, factor null": (dict(_YARN, factor=None, mscale=1.0, mscale_all_dim=0.5), {}),
}


def test_frequencies_equal_transformers(tmp_path):
    cases, expected = [], []
    for name in SCALINGS:
        model = scaled_model(name)
        sizes = dict(
            hidden_size=128,
            num_attention_heads=1,
            head_dim=128,
            intermediate_size=8,
            num_hidden_layers=1,
        )
        whole = scaled_model(name, fraction=1.0)
        fields = rope_fields(whole, FAMILIES["llama"])["rope_parameters"]
        for seq_len in (4096, 2**20):
            config = sizes | dict(
                rope_parameters=fields | dict(partial_rotary_factor=model.rope.fraction),
                max_position_embeddings=max_position_embeddings(whole, seq_len, 0),
            )
            cases.append((config, seq_len))
            expected.append(rope_frequencies(model, "full", seq_len))
    for parameters, outside in CORNER_CASES.values():
        config = (
            sizes
            | dict(max_position_embeddings=131_072)
            | outside
            | dict(rope_parameters=parameters)
        )
        settings = rope_settings(config, "config.json", FAMILIES["llama"], ("full",))
        cases.append((config, 2**20))
        expected.append(rope_frequencies(model_from(LLAMA.by_path | settings), "full", 2**20))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("reference_rope.py")
    command = [PYTHON, script, tmp_path / "cases.json", tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (inverse, factor), ours in zip(
        json.loads((tmp_path / "out.json").read_text()), expected, strict=True
    ):
        np.testing.assert_allclose(ours.radians_per_token, inverse, rtol=3e-6)  # theirs are float32
        assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


def settings_of_extension(name: str) -> dict:
    original = (
        {} if name in ("linear", "ntk") else {"rope_scaling_original_tokens": ORIGINAL_TOKENS}
    )
    return EXTENSIONS[name] | original


def is_compared(name: str, num_tokens: int) -> bool:
    """Whether the RoPE differs from that at the other length."""
    return num_tokens > ORIGINAL_TOKENS or name in CHANGES_WITH_LENGTH


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "original", "qwen3", dtype=np.float32)


@pytest.fixture(scope="module")
def references(original, tmp_path_factory):
    """Logits and gradients of transformers by (extension, number of tokens); None is the model
    without scaling.
    """
    root, jobs = tmp_path_factory.mktemp("extended"), {}
    for num_tokens in LENGTHS:
        jobs[None, num_tokens] = original
        for name in EXTENSIONS:
            if is_compared(name, num_tokens):
                step = step_of(original, num_tokens, {}, **settings_of_extension(name))
                extended = shutil.copytree(original, root / f"{name}-{num_tokens}")
                base = json.loads((original / "config.json").read_text())
                content = config_json_of(
                    step.config.model, base, seq_len=num_tokens, dtype="float32"
                )
                (extended / "config.json").write_text(json.dumps(content))
                jobs[name, num_tokens] = extended
    arguments = {
        key: dict(job="gradients", directory=str(directory), tokens=tokens_of(key[1]).tolist())
        for key, directory in jobs.items()
    }
    results = run_jobs(root, arguments)
    return {key: results[key] | {"directory": directory} for key, directory in jobs.items()}


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("name", EXTENSIONS)
def test_extended_model_equals_transformers(name, num_tokens, original, references):
    """A model without scaling, trained with one of them; transformers reads the exported
    config.json.
    """
    if not is_compared(name, num_tokens):
        pytest.skip("the RoPE is the same as at the other length")
    step = step_of(
        original, num_tokens, MESHES["context=4 x tensor=2"], **settings_of_extension(name)
    )
    expected = dict(references[name, num_tokens])
    extended = expected.pop("directory")
    if num_tokens > ORIGINAL_TOKENS or name == "longrope":
        assert np.abs(expected["logits"] - references[None, num_tokens]["logits"]).max() >= 0.1
    params, _ = load_pretrained(step)
    assert_small(errors_of(step, params, expected, num_tokens), f"{name}, {num_tokens} tokens")

    again = load(ConfigDict({"model": {"init_from": str(extended)}})).model
    # written as another rope_theta, and with the computed attention factor
    if name not in ("ntk", "longrope"):
        assert again.rope == step.config.model.rope
