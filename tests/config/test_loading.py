import dataclasses
import json

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxlc.config import PRESETS, defaults, load, to_dict
from jaxlc.config.checks import RANGES
from jaxlc.config.loading import SECTIONS, field_types
from jaxlc.core.errors import UserError


def rejected(config: ConfigDict) -> str:
    """The sentence with which the door turns `config` away."""
    with pytest.raises(UserError) as caught:
        load(config)
    sentence = str(caught.value)
    assert sentence and "\n" not in sentence
    return sentence


def changed(section: str, **values) -> ConfigDict:
    """The defaults with some values replaced, also by ones of another type."""
    config = defaults().to_dict()
    config[section].update(values)
    return ConfigDict(config)


def test_defaults_load_as_the_tiny_preset_and_the_schema():
    config = load(defaults())
    assert config.model == PRESETS["tiny"]
    for section, cls in SECTIONS.items():
        if section != "model":
            assert getattr(config, section) == cls()


def test_preset_with_overrides():
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.model.num_layers = 2
    assert load(config).model == dataclasses.replace(PRESETS["llama3.1-8b"], num_layers=2)


def test_placeholders_are_typed():
    with pytest.raises(TypeError):
        defaults().model.num_layers = "two"


@pytest.mark.parametrize("preset", PRESETS)
def test_round_trip_through_json(preset):
    config = defaults()
    config.model.preset = preset
    config.data.sources = ["a", "b"]
    loaded = load(config)
    assert loaded.data.sources == ("a", "b")
    assert load(loaded) == loaded
    assert json.loads(json.dumps(to_dict(loaded))) == to_dict(loaded)
    assert load(ConfigDict(to_dict(loaded))) == loaded


def test_what_is_left_out_has_its_default():
    assert load(ConfigDict({"mesh": {"context": 2}})) == load(changed("mesh", context=2))


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [
        ("train", "step", 3, "did you mean config.train.steps?"),
        ("model", "num_layer", 3, "did you mean config.model.num_layers?"),
        ("train", "steps", 3.0, "config.train.steps is 3.0, which is not a whole number"),
        ("train", "steps", True, "config.train.steps is True, which is not a whole number"),
        ("train", "steps", None, "config.train.steps is None, which is not a whole number"),
        ("optimizer", "learning_rate", "1e-3", "optimizer.learning_rate is '1e-3', which is not a finite number"),
        ("optimizer", "learning_rate", True, "which is not a finite number"),
        ("optimizer", "learning_rate", float("nan"), "which is not a finite number"),
        ("model", "qk_norm", 1, "config.model.qk_norm is 1, which is not true or false"),
        ("data", "tokenizer", 3, "which is not a string"),
        ("data", "sources", "a.txt", "config.data.sources is 'a.txt', which is not a list of strings"),
        ("data", "sources", (1,), "which is not a list of strings"),
        ("precision", "bf16_layers", ("0", "x"), "('0', 'x'), which is not a list of whole numbers"),
        ("precision", "bf16_layers", (True,), "which is not a list of whole numbers"),
        ("memory", "remat", "ful", "config.memory.remat is 'ful', which is not one of 'none', 'full'"),
        ("model", "preset", "llama3-8", "did you mean llama3.1-8b?"),
        ("model", "preset", "xyz", "there are llama3.1-70b"),
    ],
)
def test_wrong_keys_types_and_names(section, name, value, words):
    assert words in rejected(changed(section, **{name: value}))


def test_unknown_and_misused_sections():
    assert "did you mean config.model?" in rejected(ConfigDict({"modle": {}}))
    assert "there is no config.steps; did you mean config.train.steps?" in rejected(ConfigDict({"steps": 3}))
    assert "config.mesh is a section" in rejected(ConfigDict({"mesh": 8}))


def test_what_serves_as_another_type():
    loaded = load(ConfigDict({
        "optimizer": dict(learning_rate=1, max_grad_norm=np.float32(0.5)),
        "train": dict(steps=np.int64(20)),
    }))  # fmt: skip
    assert type(loaded.optimizer.learning_rate) is float
    assert type(loaded.optimizer.max_grad_norm) is float
    assert type(loaded.train.steps) is int
    json.dumps(to_dict(loaded))


def test_every_number_has_a_range():
    """So that a new setting cannot be forgotten."""
    for section in SECTIONS:
        numbers = {name for name, hint in field_types(section).items() if hint in (int, float)}
        assert RANGES[section].keys() == numbers, section
