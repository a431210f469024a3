import copy
import pickle
from pathlib import Path

import pytest
from ml_collections import ConfigDict, FrozenConfigDict

from jaxlc.config import defaults, load, load_stages
from jaxlc.core.errors import UserError


def assign(config: ConfigDict, path: str, value) -> None:
    section, name = path.split(".")
    setattr(config[section], name, value)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("train.steps", "1e3", 1000),
        ("train.steps", 1e3, 1000),
        ("train.steps", str(2**53 + 1), 2**53 + 1),
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("optimizer.learning_rate", 1, 1.0),
        ("attention.document_mask", "false", False),
        ("model.tie_embeddings", "True", True),
        ("model.num_layers", "2", 2),
        ("model.num_layers", None, None),
        ("data.sources", "texts", ("texts",)),
        ("data.sources", "a,b", ("a", "b")),
        ("data.sources", Path("texts"), ("texts",)),
        ("data.cache_dir", Path("cache"), "cache"),
        ("memory.save", ["query", "key"], ("query", "key")),
        ("memory.save", [], ()),
        ("precision.bf16_layers", "0,-1", (0, -1)),
        ("precision.bf16_layers", "(0, 2)", (0, 2)),
    ],
)
def test_assignment_converts_values_as_the_command_line(path, value, expected):
    config = defaults()
    assign(config, path, value)
    section, name = path.split(".")
    assert (config[section][name], type(config[section][name])) == (expected, type(expected))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("train.stps", 3, "unknown setting config.train.stps: did you mean config.train.steps?"),
        (
            "optimizer.learning_rate",
            "fast",
            "invalid value 'fast' for config.optimizer.learning_rate: expected a fini",
        ),
        ("optimizer.learning_rate", "nan", "expected a finite number"),
        ("attention.document_mask", "maybe", "expected true or false"),
        ("attention.document_mask", 1, "expected true or false"),
        ("attention.strategy", "rign", "did you mean ring?"),
        ("memory.remat", None, "invalid value None for config.memory.remat: expected one of"),
        ("memory.save", 3, "expected a list of strings"),
        ("memory.save", "(query", "expected a list of strings"),
        ("precision.bf16_layers", [0.5], "expected a list of integers"),
        ("model.preset", "llama3-8", "did you mean llama3.1-8b?"),
    ],
)
def test_invalid_assignment_raises_the_message_of_load(path, value, words):
    section, name = path.split(".")
    config = defaults()
    with pytest.raises(UserError) as at_assignment:
        assign(config, path, value)
    assert words in str(at_assignment.value)
    assert config == defaults()
    if value is not None:
        plain = defaults().to_dict()
        plain[section][name] = value
        with pytest.raises(UserError) as at_load:
            load(ConfigDict(plain))
        assert str(at_load.value) == str(at_assignment.value)


def _unknown_section(config):
    config.trian = 3


def _read_of_unknown_section(config):
    config.trian.steps = 3


def _value_for_section(config):
    config.train = 3


def _item(config):
    config["train"]["stps"] = 3


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (_unknown_section, "unknown setting config.trian: did you mean config.train?"),
        (_read_of_unknown_section, "unknown setting config.trian: did you mean config.train?"),
        (_value_for_section, "config.train is a section: set one of its settings"),
        (_item, "did you mean config.train.steps?"),
        (lambda config: config.train.stps, "did you mean config.train.steps?"),
        (lambda config: config.train.update(stps=3), "did you mean config.train.steps?"),
        (lambda config: config.update({"train": {"stps": 3}}), "did you mean config.train.steps?"),
        (
            lambda config: config.update_from_flattened_dict({"train.stps": 3}),
            "did you mean config.train.steps?",
        ),
        (
            lambda config: config.update_from_flattened_dict({"x.trian.seed": 3}, "x."),
            "mean config.train.seed?",
        ),
        (
            lambda config: config.update_from_flattened_dict({"train.steps": "x"}),
            "expected an integer",
        ),
    ],
)
def test_unknown_name_raises_with_the_nearest_one(statement, words):
    config = defaults()
    with pytest.raises(UserError) as caught:
        statement(config)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert config == defaults()


def test_unknown_name_is_no_attribute():
    assert not hasattr(defaults(), "trian")
    assert not hasattr(defaults().train, "_ipython_display_")


def test_section_set_to_dict_keeps_other_defaults():
    config = defaults()
    config.train = {"steps": "7"}
    expected = defaults()
    expected.train.steps = 7
    assert config == expected


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: config.copy_and_resolve_references(),
    ],
)
def test_copy_is_independent_and_checks_names(copied):
    config = defaults()
    config.mesh.context = 2
    other = copied(config)
    assert load(other) == load(config)
    other.mesh.context = 4
    assert config.mesh.context == 2
    with pytest.raises(UserError, match=r"config\.mesh\.context"):
        other.mesh.contxt = 2


def test_reference_between_settings_follows_its_source():
    config = defaults()
    config.train.eval_sequences = config.train.get_ref("global_batch_size")
    config.train.global_batch_size = 6
    assert load(config).train.eval_sequences == 6


def test_frozen_config_dict_of_settings_loads():
    config = defaults()
    assert load(FrozenConfigDict(config)) == load(config)
    config.stages = [dict(name="b", steps=1), dict(name="a", steps=2)]
    assert load_stages(FrozenConfigDict(config)) == load_stages(config)


def test_config_repr_lists_differences_by_section():
    config = defaults()
    config.model.preset = "llama3.2-1b"
    config.model.num_layers = 2
    config.mesh.context = 4
    config.data.sources = "a,b"
    assert repr(load(config)) == (
        "Config: differences from the defaults\n"
        "  model  preset=llama3.2-1b num_layers=2\n"
        "  mesh   context=4\n"
        "  data   sources=a,b"
    )
    assert repr(load(defaults())) == "Config: all settings have their defaults"


@pytest.mark.parametrize("is_frozen", [False, True])
def test_config_html_has_differences_and_collapsed_settings(is_frozen):
    config = defaults()
    config.optimizer.learning_rate = 1e-3
    config.data.tokenizer = "<b>&.json"
    text = (load(config) if is_frozen else config)._repr_html_()
    shown, folded = text.split("<details>")
    for part in ("learning_rate", " 0.001 ", " 0.0003", "&lt;b&gt;&amp;.json", " bytes"):
        assert part in shown
    assert "seq_len" not in shown
    for part in (
        "data.seq_len = 4096",
        "optimizer.learning_rate = 0.001",
        "data.tokenizer = &lt;b&gt;&amp;.json",
    ):
        assert part in folded
    assert "<b>" not in text


def test_section_html_has_its_own_settings_only():
    config = defaults()
    config.mesh.context = 8
    config.train.steps = 3
    assert "context" in config.mesh._repr_html_()
    assert "steps" not in config.mesh._repr_html_()
    assert "all settings have their defaults" in config.data._repr_html_()


def test_text_of_settings_has_one_plain_line_per_value():
    config = defaults()
    config.data.sources = ("books", "papers")
    lines = str(config).splitlines()
    assert "  sources: books, papers" in lines and "  num_layers: not set" in lines
    assert "!!python" not in str(config) and str(config.data) in str(config)
