"""RoPE against `transformers`: frequencies of every kind of scaling, and logits and gradients of extended models.

Needs JAXLC_TRANSFORMERS_PYTHON, as tests/hf/test_transformers.py.
"""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxlc.config import load
from jaxlc.config.config_json import ROPE_SETTINGS, config_json_of
from jaxlc.config.families import FAMILIES
from jaxlc.config.rope_json import max_position_embeddings, rope_fields
from jaxlc.models.rope import rope_frequencies
from jaxlc.train.language_model import LanguageModel
from jaxlc.train.pretrained_params import load_pretrained
from tests.hf.models import write_model
from tests.hf.test_transformers import (
    LENGTHS,
    MESHES,
    ORIGINAL_TOKENS,
    PYTHON,
    gradients_of,
    reference,
    relative_error,
    step_of,
    tokens_of,
)
from tests.models.plain_rope import SCALINGS, scaled_model

pytestmark = pytest.mark.skipif(not PYTHON, reason="needs torch and transformers: set JAXLC_TRANSFORMERS_PYTHON")
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


def test_frequencies_equal_transformers(tmp_path):
    cases, expected = [], []
    for name in SCALINGS:
        model = scaled_model(name)
        sizes = dict(hidden_size=128, num_attention_heads=1, head_dim=128, intermediate_size=8, num_hidden_layers=1)
        whole = scaled_model(name, rope_fraction=1.0)
        fields = rope_fields(whole, FAMILIES["llama"])["rope_parameters"]
        for seq_len in (4096, 2**20):
            config = sizes | dict(
                rope_parameters=fields | dict(partial_rotary_factor=model.rope_fraction),
                max_position_embeddings=max_position_embeddings(whole, seq_len, 0),
            )
            cases.append((config, seq_len))
            expected.append(rope_frequencies(model, "full", seq_len))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("reference_rope.py")
    command = [PYTHON, script, tmp_path / "cases.json", tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (inverse, factor), ours in zip(json.loads((tmp_path / "out.json").read_text()), expected, strict=True):
        np.testing.assert_allclose(ours.radians_per_token, inverse, rtol=3e-6)  # theirs are float32
        assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("name", EXTENSIONS)
def test_extended_model_equals_transformers(name, num_tokens, tmp_path):
    """A model without scaling, trained with one of them; transformers reads the exported config.json."""
    if num_tokens < ORIGINAL_TOKENS and name not in CHANGES_WITH_LENGTH:
        pytest.skip("the RoPE is the same as at the other length")
    original = write_model(tmp_path / "original", "qwen3", dtype=np.float32)
    settings = dict(EXTENSIONS[name])
    if name not in ("linear", "ntk"):
        settings["rope_scaling_original_tokens"] = ORIGINAL_TOKENS
    step = step_of(original, num_tokens, MESHES["context=4 x tensor=2"], **settings)
    extended = shutil.copytree(original, tmp_path / "extended")
    base = json.loads((original / "config.json").read_text())
    content = config_json_of(step.config.model, base, seq_len=num_tokens, dtype="float32")
    (extended / "config.json").write_text(json.dumps(content))

    expected, without = reference(extended, num_tokens), reference(original, num_tokens)
    if num_tokens > ORIGINAL_TOKENS or name == "longrope":
        assert np.abs(expected["logits"] - without["logits"]).max() >= 0.1
    params, _ = load_pretrained(step)
    logits = LanguageModel(step, params, None).logits(tokens_of(num_tokens))
    errors = {"logits": relative_error(logits, expected["logits"])}
    for parameter, gradient in gradients_of(step, params, num_tokens).items():
        errors[parameter] = relative_error(gradient, expected[f"gradient/{parameter}"])
    worst = max(errors, key=errors.__getitem__)
    print(f"{name}, {num_tokens} tokens: logits {errors['logits']:.1e}, largest {worst} {errors[worst]:.1e}")
    assert errors[worst] <= 1e-4, worst

    again = load(ConfigDict({"model": {"init_from": str(extended)}})).model
    if name not in ("ntk", "longrope"):  # written as another rope_theta, and with the computed attention factor
        assert all(getattr(again, x) == getattr(step.config.model, x) for x in ROPE_SETTINGS)
