"""The editable settings: a ConfigDict that checks names and values at the assignment. Imports no jax."""

import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ml_collections import ConfigDict, FieldReference, config_dict

from jaxlc.config import differences
from jaxlc.config.frozen import DEFAULT_PRESET, SECTIONS, default_values, field_types, is_placeholder
from jaxlc.config.loading import check_key, check_preset
from jaxlc.config.mixture import MixtureSettings, is_mixture, is_source_path, parse_mixture
from jaxlc.config.stage_configs import parse_stages
from jaxlc.config.values import typed


class Settings(ConfigDict):
    """All settings, as returned by `defaults()`. Ranges and contradictions are checked later, by `load`."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets a section, as when a ConfigDict is copied. A dict becomes the defaults, updated with its values.

        `stages` is not a section but a list; see `jaxlc.config.stages`.

        Raises:
          SettingError: an unknown section, or a value that is not a section; as `parse_stages`.
        """
        if key == "stages":
            super().__setitem__(key, parse_stages(value))
            return
        if key not in SECTIONS or not isinstance(value, (Mapping, ConfigDict)):
            check_key(key)
        if not isinstance(value, _SECTION_CLASSES[key]):
            section = _default_section(key)
            section.update(value)
            value = section
        super().__setitem__(key, value)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "stages" and attribute not in self.keys():
            return ()
        if attribute not in self.keys() and not attribute.startswith("_"):
            check_key(attribute)
        return super().__getattr__(attribute)

    def update_from_flattened_dict(self, flattened_dict: Mapping[str, Any], strip_prefix: str = "") -> None:
        """Sets values by their paths: {"mesh.context": 8}; see `ConfigDict.update_from_flattened_dict`.

        Raises:
          SettingError: an unknown setting, or an invalid value.
        """
        others = {}
        for key, value in flattened_dict.items():
            path = key.removeprefix(strip_prefix)
            if key.startswith(strip_prefix):
                check_key(path.partition("[")[0])
            if key.startswith(strip_prefix) and is_source_path(path):
                self.data.mixture.set_field(path, value)
            else:
                others[key] = value
        super().update_from_flattened_dict(others, strip_prefix)

    def __str__(self) -> str:
        return "\n".join(f"{name}:\n{section}" for name, section in self.items())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return differences.as_html("Settings", *_set_and_default_values(self))


class Section(ConfigDict):
    """The settings of one section. Values are converted to their declared types, as on the command line."""

    _section: ClassVar[str]

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets a value.

        Raises:
          SettingError: an unknown setting, a value of a wrong type, or a string that is not one of the choices.
        """
        check_key(f"{self._section}.{key}")
        if is_mixture(self._section, key):
            super().__setitem__(
                key, value if isinstance(value, MixtureSettings) else MixtureSettings(parse_mixture(value))
            )
            return
        is_unset = value is None and is_placeholder(self._section, key)
        if not isinstance(value, FieldReference) and not is_unset:
            value = typed(f"{self._section}.{key}", value, field_types(self._section)[key])
            if (self._section, key) == ("model", "preset"):
                check_preset(value)
        super().__setitem__(key, value)

    def __getattr__(self, attribute: str) -> Any:
        if attribute not in self.keys() and not attribute.startswith("_"):
            check_key(f"{self._section}.{attribute}")
        return super().__getattr__(attribute)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored_section, (self._section, dict(self.items(preserve_field_references=True)), self.is_locked)

    def __str__(self) -> str:
        return "\n".join(f"  {name}: {_value_text(value)}" for name, value in self.items())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        root = Settings({self._section: self})
        return differences.as_html(f"Settings of {self._section}", *_set_and_default_values(root))


_SECTION_CLASSES = {name: type(f"{name.title()}Section", (Section,), {"_section": name}) for name in SECTIONS}


def defaults() -> Settings:
    """All settings with their default values, for a config file or a notebook to edit.

    `model.preset` names a model; the other fields of `model` are placeholders that mean "as in the preset" until set.
    `data.tokenizer` is a placeholder that means the tokenizer of `model.init_from`, or bytes.
    """
    return Settings({section: _default_section(section) for section in SECTIONS})


def _default_section(section: str) -> Section:
    values = default_values(DEFAULT_PRESET)[section]
    placeholders = {
        name: config_dict.placeholder(_placeholder_type(hint))
        for name, hint in field_types(section).items()
        if is_placeholder(section, name) and name not in ("preset", "init_from")
    }
    return _SECTION_CLASSES[section](values | placeholders)


def _placeholder_type(hint: Any) -> type:
    """The class of a setting's values, which ConfigDict checks; sections check them further."""
    return {tuple: tuple, Literal: str}.get(typing.get_origin(hint), hint)


def _restored_section(section: str, values: dict[str, Any], is_locked: bool) -> Section:
    """The inverse of `Section.__reduce__`."""
    restored = _SECTION_CLASSES[section](values)
    return restored.lock() if is_locked else restored


def _set_and_default_values(settings: Settings) -> tuple[differences.Values, differences.Values]:
    """The values that are set, without the model's fields that are as in the preset, and the defaults."""
    values = settings.to_dict()
    preset = values.get("model", {}).get("preset") or DEFAULT_PRESET
    is_set = {
        section: {name: value for name, value in fields.items() if value is not None}
        for section, fields in values.items()
        if section in SECTIONS
    }
    return is_set, default_values(preset)


def _value_text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else "not set" if value is None else str(value)
