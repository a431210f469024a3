"""Converts an editable ConfigDict to checked and frozen dataclasses. Imports no jax."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from jaxlc.config.checks.all_checks import check
from jaxlc.config.frozen import DEFAULT_PRESET, SECTIONS, Config, field_types, is_placeholder, to_dict
from jaxlc.config.mixture import (
    is_mixture,
    is_source_path,
    merged_mixture,
    parse_mixture,
    source_configs,
    split_source_path,
)
from jaxlc.config.models.presets import PRESETS, RENAMED_PRESETS
from jaxlc.config.models.pretrained import locate, with_overrides
from jaxlc.config.models.rope_settings import with_scaling
from jaxlc.config.old_configs import REMOVED, RENAMED, upgraded
from jaxlc.config.values import SettingError, invalid_value, typed
from jaxlc.core.errors import UserError
from jaxlc.core.suggestions import nearest_name


def load(config: ConfigDict | Config) -> Config:
    """Checks a config and freezes it. Missing settings get their defaults; a Config is checked again.

    Raises:
      UserError: an unknown setting, a value of the wrong type or out of range, or two values that contradict each
        other. The message is one line with the value and what to do.
    """
    if not isinstance(config, ConfigDict | Config):
        raise UserError(f"invalid config {config!r}: expected what jaxlc.config.read_config or defaults returns")
    values: dict[str, Any] = to_dict(config) if isinstance(config, Config) else config.to_dict()
    if stages := values.pop("stages", ()):
        names = ", ".join(stage.name for stage in stages)
        raise UserError(f"the config has the stages {names}: use jaxlc.config.load_stages, and the config of one stage")
    for section, section_values in values.items():
        if section not in SECTIONS or not isinstance(section_values, dict):
            check_key(section)
        for name in section_values:
            check_key(f"{section}.{name}")
    sections = {section: _checked_section(section, values.get(section, {})) for section in SECTIONS}
    sections["model"] = _with_shape(sections["model"])
    if "tokenizer" not in sections["data"] and sections["model"]["init_from"]:
        sections["data"]["tokenizer"] = locate(sections["model"]["init_from"]).tokenizer()
    loaded = Config(**{name: cls(**sections[name]) for name, cls in SECTIONS.items()})
    check(loaded)
    return loaded


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """A copy of the config with other values, by their paths: {"mesh.context": 8}.

    Raises:
      UserError: as `load`.
    """
    values = to_dict(config)
    for path, value in settings.items():
        section, _, name = path.partition(".")
        if is_source_path(path):
            source, field = split_source_path(path)
            values[section]["mixture"] = merged_mixture(values[section]["mixture"], {source: {field: value}})
        else:
            values[section][name] = value
    return load(ConfigDict(values))


def transport_settings(transport: str) -> dict[str, Any]:
    """The settings that select a transport; the NVSHMEM heap is reset for transports other than NVSHMEM."""
    heap: dict[str, Any] = {} if transport in ("auto", "nvshmem") else {"runtime.nvshmem_heap_bytes": 0}
    return {"runtime.transport": transport} | heap


def from_dict(values: dict[str, dict[str, Any]]) -> Config:
    """The Config that `to_dict` converted, also by an older version; see `old_configs.upgraded`.

    Raises:
      UserError: as `load` and `old_configs.upgraded`.
    """
    return load(ConfigDict(upgraded(values)))


def check_key(path: str) -> None:
    """Checks that `path` is a setting such as "mesh.context".

    Raises:
      SettingError: it is not; the message names the nearest setting, or the new name of a renamed one.
    """
    if path in RENAMED:
        raise SettingError(f"config.{path} was renamed: use config.{RENAMED[path]}")
    if path in REMOVED:
        raise SettingError(f"config.{path} was removed: {REMOVED[path]}")
    if is_source_path(path):
        split_source_path(path)
        return
    section, _, name = path.partition(".")
    if section == "stages":
        raise SettingError("config.stages is a list: set a value of one stage with --config.stages.NAME.KEY=VALUE")
    if section not in SECTIONS or (name and name not in field_types(section)):
        raise SettingError(f"unknown setting config.{path}: {_nearest_key(path)}")
    if not name:
        example = next(iter(field_types(section)))
        raise SettingError(
            f"config.{section} is a section: set one of its settings, such as config.{section}.{example}"
        )


def _nearest_key(path: str) -> str:
    keys = [f"{section}.{name}" for section in SECTIONS for name in field_types(section)]
    section, _, name = path.rpartition(".")
    same_name = [key for key in keys if key.endswith("." + name)]
    if same_name and not (section and nearest_name(path, same_name)):
        return f"did you mean {' or '.join(f'config.{key}' for key in same_name)}?"
    if nearest := nearest_name(path, same_name or [*keys, *SECTIONS]):
        return f"did you mean config.{nearest}?"
    known = [f"{section}.{field}" for field in field_types(section)] if section in SECTIONS else SECTIONS
    return f"expected one of {', '.join(sorted(f'config.{key}' for key in known))}"


def _checked_section(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with their declared types, without placeholders."""
    hints = field_types(section)
    is_set = {name: value for name, value in values.items() if value is not None or not is_placeholder(section, name)}
    return {
        name: source_configs(parse_mixture(value))
        if is_mixture(section, name)
        else typed(f"{section}.{name}", value, hints[name])
        for name, value in is_set.items()
    }


def _with_shape(model: dict[str, Any]) -> dict[str, Any]:
    """The settings of the model on top of those of init_from or of its preset.

    A config that was loaded before has all of them, and init_from is not read again: the model may be gone.
    """
    check_preset(preset := model.get("preset", DEFAULT_PRESET))
    of_preset = dataclasses.asdict(PRESETS[preset])
    if model.keys() == of_preset.keys():
        return model
    if not model.get("init_from"):
        return with_scaling(of_preset, model)
    explicit = {name: value for name, value in model.items() if name not in ("preset", "init_from")}
    shape = with_overrides(locate(model["init_from"]), explicit)
    return of_preset | shape | {"preset": DEFAULT_PRESET, "init_from": model["init_from"]}


def check_preset(preset: str) -> None:
    """Checks that `preset` is a name in PRESETS.

    Raises:
      SettingError: it is not; the message names the nearest preset, or the new name of a renamed one.
    """
    if preset in RENAMED_PRESETS:
        raise SettingError(f"the preset {preset!r} was renamed: use --config.model.preset={RENAMED_PRESETS[preset]}")
    if preset not in PRESETS:
        raise SettingError(invalid_value("model.preset", preset, f"one of {', '.join(PRESETS)}", PRESETS))
