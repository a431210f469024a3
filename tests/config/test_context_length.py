"""The context length of a pretrained model, with scaled RoPE and of runs, and the warning that
names settings.
"""

import json
import re

import pytest

from jaxlc.config import defaults, load, read_config, to_dict
from jaxlc.config.models.presets import model_name
from jaxlc.config.models.pretrained import context_tokens, context_warning
from tests.hf.models import CASES

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA3 = dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=16) | dict(
    low_freq_factor=1.0, high_freq_factor=4.0
)
BY_YARN = dict(scaling="yarn", factor=4, original_tokens=64)


@pytest.fixture
def model_of(tmp_path):
    """The model of a config that starts from a directory without weights, whose context is 64
    tokens.
    """

    def model_of(old_scaling: dict | None = None, case: str = "llama", **settings):
        config = CASES[case].config | dict(rope_scaling=old_scaling, max_position_embeddings=64)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return load_model(tmp_path, **settings)

    return model_of


def load_model(directory, **rope):
    config = defaults()
    config.model.init_from = str(directory)
    config.model.rope.update(rope)
    return load(config).model


@pytest.mark.parametrize(
    ("scaling", "settings", "context"),
    [
        (None, {}, 64),
        (None, BY_YARN, 256),
        (None, dict(scaling="linear", factor=3), 192),
        (None, dict(theta=1e6), None),  # extends the context by an unknown factor
        # grows with the sequence
        (None, dict(scaling="dynamic_ntk", original_tokens=64), None),
        (YARN, {}, 256),  # as published with the length before scaling
        (YARN, dict(factor=8), 512),
        (YARN, dict(scaling="none"), 64),
        (LLAMA3, {}, 128),
        (dict(rope_type="linear", factor=2.0), {}, 64),
        (dict(rope_type="linear", factor=2.0), dict(factor=8), 256),
        (dict(rope_type="linear", factor=2.0), dict(scaling="none"), 32),
    ],
)
def test_context_of_directory_follows_rope(model_of, scaling, settings, context):
    assert context_tokens(model_of(scaling, **settings)) == context


@pytest.mark.parametrize(
    ("scaling", "settings", "num_tokens"),
    [
        (None, {}, 500),
        (None, dict(scaling="ntk", factor=1.5), 500),
        (YARN, {}, 1000),
        (LLAMA3, {}, 1000),
        (dict(rope_type="linear", factor=2.0), {}, 500),
    ],
)
def test_advice_of_warning_extends_the_context(model_of, tmp_path, scaling, settings, num_tokens):
    model = model_of(scaling, **settings)
    warning = context_warning(model, num_tokens)
    assert (
        f"config.data.seq_len={num_tokens} is longer than the context of {tmp_path.name}, "
        in warning
    )
    advice = dict(re.findall(r"--config\.model\.rope\.(\w+)=([\w.]+)", warning))
    assert context_warning(load_model(tmp_path, **settings | advice), num_tokens) is None
    assert context_warning(model, context_tokens(model)) is None
    assert "--config.stages.long.model.rope." in context_warning(model, num_tokens, stage="long")


def test_context_is_unlimited_without_full_layers_and_unknown_without_base(model_of, tmp_path):
    assert context_tokens(model_of(case="mistral_window")) is None  # a window in all layers
    model = model_of()
    (tmp_path / "config.json").unlink()
    assert context_tokens(model) is None
    assert context_tokens(load(defaults()).model) is None  # random weights


def test_context_of_run_is_its_trained_length(model_of, tmp_path):
    random, limited = load(defaults()).model, model_of()
    assert context_tokens(random, trained_tokens=4096) == 4096
    assert context_tokens(limited, trained_tokens=128) == 128
    assert "8,192 tokens are more than the context of the model, 4,096" in context_warning(
        random, 8192, trained_tokens=4096
    )
    config = defaults()
    config.data.seq_len = 128
    checkpoint = tmp_path / "run" / "checkpoints" / "7"
    (checkpoint / "meta").mkdir(parents=True)
    (checkpoint / "meta" / "metadata").write_text(json.dumps(dict(config=to_dict(load(config)))))
    assert context_tokens(load_model(tmp_path / "run")) == 128
    assert context_tokens(load_model(checkpoint, scaling="linear", factor=2)) == 256


@pytest.mark.parametrize(
    ("init_from", "name"),
    [
        ("", "tiny"),
        ("Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-14B"),
        ("../models/qwen14/", "qwen14"),
        ("/data/hub/models--Qwen--Qwen3-8B/snapshots/0a1b", "Qwen/Qwen3-8B"),
        ("/data/runs/long/checkpoints/300", "long step 300"),
    ],
)
def test_model_name_is_that_of_init_from(init_from, name):
    assert model_name(dict(preset="tiny", init_from=init_from)) == name


def test_model_name_of_a_preset_with_other_sizes_says_so():
    config = load(read_config("qlora_4b_t4"))
    assert model_name(vars(config.model)) == "qwen3-4b"
    stored = to_dict(config)["model"]
    assert model_name(stored) == "qwen3-4b"
    for setting, value in dict(model_dim=4096, ffn_dim=12_288, num_layers=28).items():
        assert model_name(stored | {setting: value}) == "qwen3-4b (modified)"
    assert model_name(dict(preset="tiny", num_layers=2)) == "tiny"  # no published model
