"""Converts an editable ConfigDict to checked and frozen dataclasses. Imports no jax."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxlc.config.chat_template_file import read_template, template_path
from jaxlc.config.checks.all_checks import check
from jaxlc.config.differences import NAMED_PARTS
from jaxlc.config.frozen import DEFAULT_PRESET, SECTIONS, Config, to_dict
from jaxlc.config.models.model_schema import model_from
from jaxlc.config.models.presets import PRESETS
from jaxlc.config.models.pretrained import locate, with_overrides
from jaxlc.config.models.rope_settings import with_scaling
from jaxlc.config.setting_paths import converted, set_at
from jaxlc.config.values import flattened
from jaxlc.core.errors import UserError, checked


def load(config: ConfigDict | Config, *, on_devices: bool = True) -> Config:
    """Checks a config and freezes it. Missing settings get their defaults; a Config is checked again.

    Args:
      on_devices: whether the mesh must divide the model and the sequences.
    Raises:
      UserError: an unknown setting, a value of the wrong type or out of range, or two values that contradict each
        other. The message is one line with the value and what to do.
    """
    if not isinstance(config, ConfigDict | Config):
        raise UserError(f"invalid config {config!r}: expected what jaxlc.config.read_config or defaults returns")
    values = to_dict(config) if isinstance(config, Config) else config.to_dict()
    return from_dict(values, on_devices=on_devices)


def from_dict(values: Mapping[str, Any], *, on_devices: bool = True) -> Config:
    """The Config that `to_dict` converted, such as the one that a checkpoint stores.

    Args:
      on_devices: as for `load`.
    Raises:
      UserError: as `load`.
    """
    parts: dict[str, Any] = converted("", values)
    if stages := parts.pop("stages", {}):
        names = ", ".join(stages)
        raise UserError(f"the config has the stages {names}: use jaxlc.config.load_stages, and the config of one stage")
    sections = {
        section: {name: value for name, value in parts.get(section, {}).items() if value is not None}
        for section in SECTIONS
    }
    kinds = sections["model"].pop("kinds", {})
    model = {path: value for path, value in flattened(sections["model"]).items() if value is not None}
    sections["model"] = _with_shape(model | {"kinds": kinds})
    if "tokenizer" not in sections["data"] and sections["model"]["init_from"]:
        sections["data"] = locate(sections["model"]["init_from"]).data_settings() | sections["data"]
    template = template_path(sections["data"].get("chat_template", ""))
    if template and template.is_file():
        # A checkpoint has the text, because the file may change or go away.
        sections["data"]["chat_template"] = read_template(template)
    for (section, setting), part in NAMED_PARTS.items():
        fields_by_name = sorted(sections[section].get(setting, {}).items())  # the order in a config has no effect
        sections[section][setting] = tuple(part(name=name, **fields) for name, fields in fields_by_name)
    parts = {name: part(**sections[name]) for name, part in SECTIONS.items() if name != "model"}
    loaded = Config(model=model_from(sections["model"]), **parts)
    check(loaded, on_devices=on_devices)
    return loaded


@checked
def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """A copy of the config with other values, by their paths: {"mesh.context": 8}.

    Raises:
      UserError: as `load`.
    """
    values = to_dict(config)
    for path, value in settings.items():
        set_at(values, path, value)
    return from_dict(values)


def _with_shape(model: dict[str, Any]) -> dict[str, Any]:
    """The settings of the model on top of those of init_from or of its preset.

    A config that was loaded before has all of them, and init_from is not read again: the model may be gone.
    """
    shape = {**PRESETS[model.get("preset", DEFAULT_PRESET)].by_path, "kinds": dict[str, Any]()}
    if shape.keys() <= model.keys():
        return model
    if not model.get("init_from"):
        return with_scaling(shape, model)
    explicit = {name: value for name, value in model.items() if name not in ("preset", "init_from") and value != {}}
    settings = with_overrides(locate(model["init_from"]), explicit)
    return shape | settings | {"preset": DEFAULT_PRESET, "init_from": model["init_from"]}
