"""Old names of settings, in all places where a config may have them."""

import json
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import jaxlc
from jaxlc.config import defaults, from_dict, load, read_config, to_dict, with_settings
from jaxlc.config.command_line import ConfigFlags, parse
from jaxlc.config.other_names import RENAMED, new_path
from jaxlc.config.settings import hint_at
from jaxlc.config.values import flattened
from jaxlc.core.errors import SettingError, UserError

SIZES = dict(
    delta_key_heads=2, delta_value_heads=4, delta_key_dim=8, delta_value_dim=8, delta_conv_taps=4
)
MODEL = dict(
    layer_kinds=("gated_delta_net", "full"),
    **SIZES,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_dim=32,
)


def sizes_of(config):
    model = load(config).model
    return (
        model.delta_net.key_heads,
        model.delta_net.conv_taps,
        model.experts.num_experts,
        model.experts.ffn_dim,
    )


def test_every_old_name_has_the_type_of_its_new_name():
    for name, path in RENAMED.items():
        assert (
            new_path(f"model.{name}")
            == new_path(f"stages.long.model.{name}")[12:]
            == f"model.{path}"
        )
        assert hint_at(f"model.{name}") == hint_at(f"model.{path}")


def test_old_names_set_the_new_settings():
    assigned, updated, paths = defaults(), defaults(), defaults()
    for name, value in MODEL.items():
        setattr(assigned.model, name, value)
    updated.model.update(MODEL)
    paths.update_from_flattened_dict({f"model.{name}": value for name, value in MODEL.items()})
    whole = ConfigDict(dict(model=MODEL))
    flags = [
        f"--config.model.{name}={value}" for name, value in MODEL.items() if name != "layer_kinds"
    ]
    command = ["jaxlc", "--config=quickstart", "--config.model.layer_kinds=gated_delta_net,full"]
    parsed = parse([*command, *flags], flags=ConfigFlags)
    for config in (assigned, updated, paths, whole, parsed.config):
        assert sizes_of(config) == (2, 4, 4, 32)
    assert assigned.model.delta_key_heads == assigned.model.delta_net.key_heads == 2
    changed = with_settings(load(assigned), {"model.delta_key_heads": 4})
    assert changed.model.delta_net.key_heads == 4


def test_stored_flat_config_is_read():
    config = defaults()
    config.model.update(MODEL)
    loaded = load(config)
    new = json.loads(json.dumps(to_dict(loaded)))
    by_path = flattened({name: value for name, value in new["model"].items() if name != "kinds"})
    new_to_old = {path: name for name, path in RENAMED.items()}
    old = {new_to_old.get(path, path): value for path, value in by_path.items()}
    assert from_dict(new | {"model": old}) == from_dict(new) == loaded


# Files of the commit before sections of the model had names; no other config or notebook of it has an old name.
OLD_FILES, ROOT = Path(__file__).with_name("old_files"), Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name",
    ["extend_qwen3_moe_256k:", "extend_qwen3_moe_256k:mini", "sft_gpt_oss_128k:mini"],
)
def test_config_file_of_before_has_the_settings_of_the_shipped_one(name):
    file, _, variant = name.partition(":")
    assert load(read_config(f"{OLD_FILES / file}.py:{variant}")) == load(read_config(name))


def test_notebook_of_before_has_the_settings_of_the_shipped_one():
    notebook = json.loads((ROOT / "notebooks" / "hybrid.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"]]
    cell = next(text for text in cells if "def config_of(" in text)
    names = dict(jaxlc=jaxlc, NAMES=32, TOKENS=128, BATCH=16, STEPS=500)
    exec(cell[cell.index("def config_of(") : cell.index("def workdir(")], names)  # noqa: S102
    old = read_config(f"{OLD_FILES}/hybrid.py:delta_net")
    assert load(old) == load(names["config_of"](("gated_delta_net", "nope"), 16))


def test_old_and_new_name_of_one_setting_conflict():
    both = {"delta_key_heads": 2, "delta_net": {"key_heads": 4}}
    words = "model.delta_key_heads=2 contradicts config.model.delta_net.key_heads=4"
    with pytest.raises(SettingError, match=words):
        load(ConfigDict(dict(model=both)))
    with pytest.raises(SettingError, match=words):
        defaults().update_from_flattened_dict(flattened(dict(model=both)))
    flags = ["--config.model.delta_key_heads=2", "--config.model.delta_net.key_heads=4"]
    with pytest.raises(UserError, match=words):
        parse(["jaxlc", "--config=64k", *flags], flags=ConfigFlags)
    same = flattened(dict(model=both)) | {"model.delta_net.key_heads": 2}
    config = defaults()
    config.update_from_flattened_dict(same)
    assert config.model.delta_net.key_heads == 2


def test_name_close_to_an_old_name_suggests_the_new_name():
    with pytest.raises(UserError, match="did you mean config.model.delta_net.key_heads"):
        parse(
            ["jaxlc", "--config=quickstart", "--config.model.delta_key_head=4"], flags=ConfigFlags
        )
