import dataclasses
import json

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxlc.config import PRESETS, defaults, from_dict, load, to_dict
from jaxlc.config.frozen import SECTIONS
from jaxlc.config.models.model_schema import RopeConfig
from jaxlc.config.schema import TrainConfig
from jaxlc.core.errors import UserError
from tests.advice import changed, rejected


def test_load_defaults_gives_tiny_preset_and_schema_defaults():
    config = load(defaults())
    assert config.model == PRESETS["tiny"]
    for section, cls in SECTIONS.items():
        if section != "model":
            assert getattr(config, section) == cls()


def test_load_preset_with_override_keeps_other_fields():
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.model.num_layers = 2
    assert load(config).model == dataclasses.replace(PRESETS["llama3.1-8b"], num_layers=2)


def test_defaults_placeholder_of_wrong_type_raises():
    with pytest.raises(
        UserError, match="invalid value 'two' for config.model.num_layers: expected an integer"
    ):
        defaults().model.num_layers = "two"


@pytest.mark.parametrize("preset", PRESETS)
def test_load_to_dict_round_trip(preset):
    config = defaults()
    config.model.preset = preset
    config.data.sources = ["a", "b"]
    loaded = load(config)
    assert loaded.data.sources == ("a", "b")
    assert load(loaded) == loaded
    assert json.loads(json.dumps(to_dict(loaded))) == to_dict(loaded)
    assert load(ConfigDict(to_dict(loaded))) == loaded


def test_stored_config_loads_without_its_model():
    stored = to_dict(load(changed("model", num_layers=3)))
    stored["model"] |= dict(init_from="/a/model/that/is/gone")
    assert from_dict(stored).model.num_layers == 3


def test_load_partial_config_fills_defaults():
    assert load(ConfigDict({"mesh": {"context": 2}})) == load(changed("mesh", context=2))


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [
        ("train", "step", 3, "did you mean config.train.steps?"),
        ("model", "num_layer", 3, "did you mean config.model.num_layers?"),
        ("train", "steps", 3.5, "invalid value 3.5 for config.train.steps: expected an integer"),
        ("train", "steps", True, "invalid value True for config.train.steps: expected an integer"),
        ("train", "seed", None, "invalid value None for config.train.seed: expected an integer"),
        (
            "optimizer",
            "learning_rate",
            "1e-3x",
            "'1e-3x' for config.optimizer.learning_rate: expected a finite number",
        ),
        ("optimizer", "learning_rate", True, "expected a finite number"),
        ("optimizer", "learning_rate", float("nan"), "expected a finite number"),
        (
            "model",
            "qkv_bias",
            1,
            "invalid value 1 for config.model.attention.qkv_bias: expected true or false",
        ),
        ("data", "tokenizer", 3, "expected a string"),
        (
            "data",
            "sources",
            3,
            "invalid value 3 for config.data.sources: expected a list of strings",
        ),
        ("data", "sources", (1,), "expected a list of strings"),
        (
            "precision",
            "bf16_layers",
            ("0", "x"),
            "('0', 'x') for config.precision.bf16_layers: expected a list",
        ),
        ("precision", "bf16_layers", (True,), "expected a list of integers"),
        (
            "memory",
            "remat",
            "ful",
            "invalid value 'ful' for config.memory.remat: expected one of 'none', 'full'",
        ),
        ("attention", "shared_prefixes", -1, "expected at least 0"),
        ("attention", "shared_prefixes", 1.5, "expected a number of levels"),
        ("attention", "strategy", "ulyses", "(did you mean ulysses?)"),
        ("model", "preset", "llama3-8", "did you mean llama3.1-8b?"),
        ("model", "preset", "xyz", "expected one of tiny, llama3.2-1b"),
    ],
)
def test_load_invalid_value_names_setting_and_expectation(section, name, value, words):
    assert words in rejected(changed(section, **{name: value}))


def test_load_unknown_section_names_nearest():
    assert "did you mean config.model?" in rejected(ConfigDict({"modle": {}}))
    assert "unknown setting config.steps: use config.train.steps" in rejected(
        ConfigDict({"steps": 3})
    )
    assert "config.mesh is a section" in rejected(ConfigDict({"mesh": 8}))


def test_load_converts_numbers_to_declared_types():
    loaded = load(ConfigDict({
        "optimizer": dict(learning_rate=1, max_grad_norm=np.float32(0.5)),
        "train": dict(steps=np.int64(20)),
    }))  # fmt: skip
    assert type(loaded.optimizer.learning_rate) is float
    assert type(loaded.optimizer.max_grad_norm) is float
    assert type(loaded.train.steps) is int
    json.dumps(to_dict(loaded))


@pytest.mark.parametrize("value, levels", [(True, 1), ("True", 1), (False, 0), ("2", 2), (3, 3)])
def test_levels_of_prefixes_may_be_true_or_false(value, levels):
    """As in workdirs of the time when there was one level."""
    loaded = load(changed("attention", shared_prefixes=value))
    assert to_dict(loaded)["attention"]["shared_prefixes"] is levels


def test_settings_accept_integral_floats_strings_and_lists():
    """In Python as on the command line."""
    config = defaults()
    config.train.steps = 1e3
    config.model.num_layers = 2.0
    config.data.sources = "a,b"
    config.memory.save = ["query"]
    loaded = load(config)
    assert (loaded.train.steps, loaded.model.num_layers) == (1000, 2)
    assert (loaded.data.sources, loaded.memory.save) == (("a", "b"), ("query",))


@pytest.mark.parametrize("value", [3.5, "x", True])
def test_settings_of_wrong_type_raise_at_assignment(value):
    config = defaults()
    with pytest.raises(
        UserError, match=f"invalid value {value!r} for config.train.steps: expected an integer"
    ):
        config.train.steps = value
    assert load(config).train.steps == TrainConfig().steps


def test_load_accepts_integral_float_and_string_of_plain_config():
    loaded = load(ConfigDict({"train": dict(steps=3.0), "data": dict(sources="a.txt")}))
    assert (loaded.train.steps, loaded.data.sources) == (3, ("a.txt",))
    assert type(loaded.train.steps) is int


@pytest.mark.parametrize(
    "model, words",
    [
        (
            dict(layer_kinds="full,ful"),
            "invalid value 'ful' for config.model.layer_kinds: expected one or more of",
        ),
        (
            dict(layer_kinds=()),
            "invalid value '' for config.model.layer_kinds: expected one or more of full, sliding, nope",
        ),
        (dict(layer_kinds="sliding"), "which need a window: set config.model.attention.window"),
        (dict(window=4), "config.model.attention.window=4 has no effect"),
        (dict(layer_kinds="full,nope", num_layers=1), "use --config.model.num_layers=2 or more"),
        (
            dict(layer_kinds="full,wid", kinds=dict(wide={})),
            "expected one or more of full, sliding, nope, latent, latent_nope, gated_delta_net, mamba2, kimi_delta,"
            " full_mamba2, none, wide",
        ),
        (
            dict(layer_kinds="full,wide"),
            "or a new kind with its settings, such as --config.model.kinds.wide.attention=",
        ),
        (
            dict(kinds=dict(wide={})),
            "no effect, since config.model.layer_kinds does not name it; use --config.model.layer_kinds=full,wide",
        ),
        (
            dict(kinds=dict(full=dict(head_dim=-2))),
            "-2 for config.model.kinds.full.head_dim: expected at least 0",
        ),
        (
            dict(attention=dict(gate_projection=True)),
            "config.model.attention.gate_projection=True needs config.model.attention.gate=True",
        ),
        (dict(kinds=dict(full=dict(head_dim=7))), "config.model.kinds.full.head_dim=7 is odd"),
        (
            dict(kinds=dict(full=dict(num_heads=3))),
            "config.model.kinds.full.num_heads=3 is not a multiple",
        ),
        (
            dict(kinds=dict(full=dict(attention="nope"))),
            "contradicts the name 'full'; use a different name",
        ),
    ],
)
def test_load_invalid_layer_kinds_raise(model, words):
    assert words in rejected(changed("model", **model))


def test_load_kinds_round_trips_and_suggests_fields():
    kinds = dict(layer_kinds="sliding,wide", window=4)
    config = changed("model", **kinds, kinds=dict(wide=dict(head_dim=16, ffn_dim=96)))
    model = load(config).model
    assert model.layer_config("wide").attention.head_dim == 16
    sliding = vars(model.layer_config("sliding"))
    assert {name: sliding[name] for name in vars(model)} == vars(model)
    assert model.window_of("wide") is None
    assert model.layer_stacks == {("layers", "sliding"): [0, 2], ("layers", "wide"): [1, 3]}
    assert from_dict(json.loads(json.dumps(to_dict(load(config))))) == load(config)
    unknown = changed("model", **kinds, kinds=dict(wide=dict(head_dims=16)))
    assert "did you mean config.model.kinds.wide.head_dim?" in rejected(unknown)
    settings = changed("model", layer_kinds="full,wide", kinds=dict(wide=dict(attention="full")))
    assert load(settings).model.layer_config("wide") == load(settings).model.layer_config("full")


def test_load_chat_template_is_the_text_of_its_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}")
    assert load(changed("data", chat_template=str(path))).data.chat_template == "{{ messages }}"
    path.write_bytes(b"\xff{{ messages }}")
    assert rejected(changed("data", chat_template=str(path))).startswith(
        "cannot read the chat template "
    )


def test_load_another_rope_scaling_drops_parameters_of_the_preset():
    llama = PRESETS["llama3.1-8b"]
    model = load(changed("model", preset="llama3.1-8b", rope_scaling="none")).model
    assert (model.rope.factor, model.rope.original_tokens) == (1.0, 0)
    model = load(
        changed("model", preset="llama3.1-8b", rope_scaling="yarn", rope_scaling_factor=4)
    ).model
    # the original context length of Llama 3.1 remains
    assert model.rope == RopeConfig(
        theta=llama.rope.theta, scaling="yarn", factor=4.0, original_tokens=8192
    )
    assert load(changed("model", preset="llama3.1-8b", rope_scaling="llama3")).model == llama


def test_load_rope_factors_from_text_round_trip():
    """As on the command line, and in a stored config."""
    factors = ",".join(str(1 + i / 16) for i in range(16))
    longrope = dict(rope_scaling="longrope", rope_scaling_factor=2, rope_scaling_original_tokens=64)
    lists = dict(rope_scaling_short_factors=factors, rope_scaling_long_factors=[2] * 16)
    config = load(changed("model", **longrope, **lists))
    assert config.model.rope.short_factors[-1] == 1 + 15 / 16
    assert config.model.rope.long_factors == (2.0,) * 16
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert "expected a list of numbers" in rejected(
        changed("model", rope_scaling_long_factors="1,two")
    )


@pytest.mark.parametrize(
    "memory, words",
    [
        (
            dict(layers_per_remat_group=2),
            "=2 is not a multiple of the 3 layers that repeat in config.model.layer_kinds; use 1",
        ),
        (
            dict(layers_per_remat_group=9),
            "=9 does not divide the 6 layers in whole groups of config.model.layer_kinds",
        ),
    ],
)
def test_load_memory_settings_that_layer_kinds_contradict_raise(memory, words):
    config = changed("model", num_layers=8, layer_kinds=("full", "sliding", "nope"), window=5)
    config.memory.update(memory)
    assert words in rejected(config)
