"""The editable settings: a ConfigDict that checks names and values at the assignment. Imports no jax."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

from ml_collections import ConfigDict, FieldReference, config_dict

from jaxlc.config import differences
from jaxlc.config.frozen import DEFAULT_PRESET, SECTIONS, default_values
from jaxlc.config.models.model_schema import SECTIONS_OF_MODEL
from jaxlc.config.old_names import check_same, new_path, renamed
from jaxlc.config.setting_paths import (
    NAMED,
    converted,
    fields_of,
    hint_at,
    is_part,
    is_placeholder,
    item_of,
    items_of,
    joined,
    set_at,
)
from jaxlc.config.stage_schema import StageConfig
from jaxlc.config.values import SettingError, defaults_of
from jaxlc.core import html
from jaxlc.core.text import did_you_mean


class Settings(ConfigDict):
    """A part of the settings: all, as `defaults()` returns them, a section, the sources of a mixture, or a stage.

    Values are converted to their declared types, as on the command line. Ranges and contradictions are checked later,
    by `load`. Sources and stages have only the values that are set.
    """

    def __init__(self, path: str = "", values: Mapping[str, Any] | None = None, is_locked: bool = False):
        """The part at `path`, such as "", "data" or "data.mixture.NAME", with `values` on top of its defaults."""
        super().__init__(type_safe=False, convert_dict=False)
        object.__setattr__(self, "_path", path)
        for name, value in {**_initial_values(path), **(values or {})}.items():
            self[name] = value
        if is_locked:
            self.lock()

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets a value, or a whole part. A dictionary for a section sets its values on top of the defaults.

        Raises:
          SettingError: an unknown setting, or an invalid value.
        """
        path = joined(self._path, key)
        if new_path(path) != path:
            section, name = new_path(path).removeprefix(f"{self._path}.").split(".")
            getattr(self, section)[name] = value
            return
        hint = hint_at(path)
        if item_of(hint) is StageConfig:
            value = Stages(Settings(f"{path}.{name}", fields) for name, fields in items_of(path, value).items())
        elif is_part(hint):
            is_same = isinstance(value, Settings) and value._path == path
            value = value if is_same else Settings(path, renamed(path, items_of(path, value)))
        elif not isinstance(value, FieldReference):
            value = converted(path, value)
        super().__setitem__(key, value)

    def __getattr__(self, attribute: str) -> Any:
        """The value. Where none is set: the name or a default of a source or stage, no stages, or an empty section.

        Raises:
          SettingError: there is no such setting or source, or the stage takes the value from the config.
        """
        if attribute in self.keys() or attribute.startswith("_"):
            return super().__getattr__(attribute)
        part, path = hint_at(self._path), joined(self._path, attribute)
        if new_path(path) != path:
            section, name = new_path(path).removeprefix(f"{self._path}.").split(".")
            return getattr(getattr(self, section), name)
        if item := item_of(part):
            question = did_you_mean(attribute, list(self.keys()) or ["(none)"])
            advice = f"add it with config.{path} = dict({next(iter(fields_of(item)))}=...)"
            raise SettingError(f"unknown {NAMED[item]} config.{path}: {question}; {advice}")
        if part in NAMED and attribute == "name":
            return self._path.rpartition(".")[2]
        if is_part(hint_at(path)):
            self[attribute] = {}
            return self[attribute]
        if part in NAMED:
            return defaults_of(part)[attribute]
        raise SettingError(f"config.{path} is not set: the stage has the value of config.{path.split('.', 2)[2]}")

    def update_from_flattened_dict(self, flattened_dict: Mapping[str, Any], strip_prefix: str = "") -> None:
        """Sets values by their paths: {"mesh.context": 8}; see `ConfigDict.update_from_flattened_dict`.

        Raises:
          SettingError: an unknown setting, or an invalid value.
        """
        for key, value in flattened_dict.items():
            new = new_path(key)
            check_same(key, value if new != key else None, new, flattened_dict.get(new))
            if key.startswith(strip_prefix):
                set_at(self, new.removeprefix(strip_prefix), value)

    def changed(self, **values: Any) -> "Settings":
        """A copy with other values; a dictionary changes the values of a section that it has.

        Raises:
          SettingError: an unknown setting, or an invalid value.
        """
        parent, _, name = self._path.rpartition(".")
        copy = Settings(joined(parent, values.pop("name", name)), self.to_dict())
        for key, value in values.items():
            copy[key] = {**copy[key], **value} if isinstance(copy.get(key), Settings) else value
        return copy

    def copy_and_resolve_references(self, visit_map: dict[int, Any] | None = None) -> "Settings":
        return Settings(self._path, self.to_dict(), is_locked=self.is_locked)

    def __reduce__(self) -> tuple[Any, ...]:
        return Settings, (self._path, dict(self.items(preserve_field_references=True)), self.is_locked)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """One line per value, indented by the depth of the part."""
        indent = "  " * len(list(filter(None, self._path.split("."))))
        for name, value in self.items():
            if isinstance(value, Settings | Stages):
                yield from (f"{indent}{name}:", *value._lines())
            else:
                text = ", ".join(map(str, value)) if isinstance(value, tuple) else value
                yield f"{indent}{name}: {'not set' if value is None else text}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        if self._path and self._path not in SECTIONS:
            return html.preformatted(str(self))
        values = {self._path: self.to_dict()} if self._path else self.to_dict()
        preset = values.get("model", {}).get("preset") or DEFAULT_PRESET
        title = f"Settings of {self._path}" if self._path else "Settings"
        return differences.as_html(title, values, default_values(preset))


class Stages(Sequence[Settings]):  # not a tuple: a FrozenConfigDict contains no tuples of ConfigDicts
    """The stages of a config in their order; each is also an attribute by its name: config.stages.long.steps."""

    def __init__(self, stages: Iterable[Settings]):
        self._stages = tuple(stages)

    def __len__(self) -> int:
        return len(self._stages)

    def __getitem__(self, key: SupportsIndex | slice | str) -> Any:
        return getattr(self, key) if isinstance(key, str) else self._stages[key]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._stages == tuple(other)

    def __getattr__(self, name: str) -> Settings:
        if name.startswith("_"):
            raise AttributeError(name)
        by_name = {stage.name: stage for stage in self}
        if name not in by_name:
            known = did_you_mean(name, by_name) if by_name else "this config has no stages"
            raise SettingError(f"unknown stage config.stages.{name}: {known}")
        return by_name[name]

    def __repr__(self) -> str:
        return repr([{"name": stage.name, **stage.to_dict()} for stage in self])

    def _lines(self) -> Iterator[str]:
        for stage in self:
            yield from (f"  {stage.name}:", *stage._lines())


def defaults() -> Settings:
    """All settings with their default values, for a config file or a notebook to edit.

    `model.preset` names a model; the other fields of `model` are placeholders that mean "as in the preset" until set.
    `data.tokenizer` is a placeholder that means the tokenizer of `model.init_from`, or bytes.
    """
    return Settings()


def _initial_values(path: str) -> dict[str, Any]:
    """The values of a new part: all sections, or the defaults of one."""
    if not path:
        return {section: {} for section in SECTIONS}
    section, *inner = path.split(".")
    values = default_values(DEFAULT_PRESET).get(section, {})
    if len(inner) == 1 and inner[0] in SECTIONS_OF_MODEL and section == "model":
        values = values[inner[0]]
    elif inner:
        values = dict[str, Any]()  # a source, a kind or a stage has only what is set
    empty: dict[str, Any] = {}
    values = {name: empty if is_part(hint_at(f"{path}.{name}")) else value for name, value in values.items()}
    unset = [name for name in values if is_placeholder(f"{path}.{name}") and name not in ("preset", "init_from")]
    return values | {name: config_dict.placeholder(object) for name in unset}
