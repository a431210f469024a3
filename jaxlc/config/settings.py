"""The editable settings: a ConfigDict that checks names and values at the assignment; and the tree of
settings: the declared type at each path "section[.NAME].field". Imports no jax.

A part of the tree is a dataclass: the config, a section, a source of data.mixture, a kind of
model.kinds, or a stage. The last three have names: sources are declared as tuple[SourceConfig,
...], and are a dictionary NAME -> settings while they are edited.
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

from ml_collections import ConfigDict, FieldReference, config_dict

from jaxlc.config import frozen
from jaxlc.config.frozen import (
    DEFAULT_PRESET,
    SECTIONS,
    Config,
    StageConfig,
    default_values,
    refusal,
)
from jaxlc.config.models.model_schema import SECTIONS_OF_MODEL, KindConfig
from jaxlc.config.models.presets import PRESETS
from jaxlc.config.other_names import RENAMED, check_same, meaning_of, new_path, renamed
from jaxlc.config.schema import SourceConfig
from jaxlc.config.values import defaults_of, invalid_value, typed
from jaxlc.core import SettingError, did_you_mean, nearest_name, preformatted

NAMED = {SourceConfig: "source", KindConfig: "layer kind", StageConfig: "stage"}


def item_of(hint: Any) -> type | None:
    """The class of the named parts in `hint`, such as SourceConfig for data.mixture; None for other
    types.
    """
    arguments = typing.get_args(hint)
    return arguments[0] if arguments and arguments[0] in NAMED else None


@functools.cache
def fields_of(part: type) -> dict[str, Any]:
    """The settings and sections of a part with their declared types, not to be changed: {"data":
    int, ...}.
    """
    hints = typing.get_type_hints(part)
    if part in NAMED:
        del hints["name"]
    own_parts: dict[type, dict[str, Any]] = {
        Config: {"stages": tuple[StageConfig, ...]},
        StageConfig: SECTIONS,
    }
    return hints | own_parts.get(part, {})


def joined(path: str, name: str) -> str:
    """The path of `name` in the part at `path`; the path of the config is ""."""
    return f"{path}.{name}" if path else name


@functools.lru_cache(maxsize=4096)
def hint_at(path: str) -> Any:
    """The declared type at a path: int for "mesh.context", SourceConfig for "data.mixture.books".

    Raises:
      SettingError: there is no such setting, and the message names the nearest one; or a stage cannot change it.
    """
    names = new_path(path).split(".") if path else []
    hint: Any = Config
    # the innermost config, source or stage, and the number of names before its own
    part, prefix = Config, 0
    for index, name in enumerate(names):
        if item := item_of(hint):
            if not re.fullmatch(r"[\w-]+", name):
                group = ".".join(names[:index])
                raise SettingError(
                    f"invalid name {name!r} of a {NAMED[item]} in config.{group}: use letters, digits, '_' and '-'"
                )
            hint = item
            part = item
            prefix = index + 1
            continue
        fields = fields_of(hint) if dataclasses.is_dataclass(hint) else {}
        if name not in fields:
            raise SettingError(_unknown(part, ".".join(names[:prefix]), ".".join(names[prefix:])))
        hint = fields[name]
    if names[:1] == ["stages"] and (
        reason := refusal(names[1], ".".join(names[2:])) if names[2:] else ""
    ):
        raise SettingError(reason)
    return hint


def _unknown(part: type, prefix: str, path: str) -> str:
    """The error for a path that is not in `part`, which is at `prefix`."""
    form = f"config.{joined(prefix, '{}')}"
    section = path.rpartition(".")[0]
    keys = _keys(part)
    own = [key for key in keys if section and key.startswith(f"{section}.")]
    known = own or sorted({key.partition(".")[0] for key in keys})
    advice = advice_for(path, part, form)
    if not advice and not section and (nearest := nearest_name(path, known, cutoff=0.8)):
        advice = f"did you mean {form.format(nearest)}?"
    advice = advice or f"expected one of {', '.join(map(form.format, sorted(known)))}"
    return f"unknown setting {form.format(path)}: {advice}"


def advice_for(path: str, part: type = Config, form: str = "config.{}") -> str:
    """What to set instead of an unknown path in `part`, as the end of a sentence; "" if no setting
    can be meant.

    It is what another program calls by this name, the setting of this name in another section, or
    one whose name is spelled alike.

    Args:
      form: how a path in `part` is written.
    """
    keys = _keys(part)
    section, _, name = path.lower().rpartition(".")
    if meaning := meaning_of(path if section or part not in NAMED else f"{NAMED[part]}.{path}"):
        return re.sub(
            r"config\.([\w.]+)",
            lambda match: form.format(match[1]) if match[1] in keys else match[0],
            meaning,
        )
    named = [(key.rpartition(".")[2], key) for key in keys]
    named += [
        (old, key) for old, new in RENAMED.items() for key in (new, f"model.{new}") if key in keys
    ]
    nearest = nearest_name(name, [known for known, _ in named], cutoff=0.8)
    found = [key for known, key in named if known == nearest]
    if nearest_section := nearest_name(section, [key.partition(".")[0] for key in found]):
        found = [key for key in found if key.startswith(f"{nearest_section}.")]
    return f"did you mean {' or '.join(map(form.format, found))}?" if found else ""


def _keys(part: type) -> list[str]:
    """The paths of all settings in `part` that can be set there."""
    keys = _all_keys(part)
    return [key for key in keys if part is not StageConfig or not refusal("", key)]


def _all_keys(part: type) -> list[str]:
    """The paths of the settings in a section, and in the sections within it."""
    keys: list[str] = []
    for name, hint in fields_of(part).items():
        if dataclasses.is_dataclass(hint):
            keys += [f"{name}.{key}" for key in _all_keys(hint)]
        else:
            keys.append(name)
    return keys


def items_of(path: str, value: Any) -> dict[str, Any]:
    """The items of a value for the part or the named parts at `path`. A list of named parts has
    their names in it.

    Raises:
      SettingError: it is no dictionary, or a list without names.
    """
    item = item_of(hint_at(path))
    if isinstance(value, (Mapping, ConfigDict)):
        return dict(value.items())
    if item is None:
        example = next(iter(fields_of(hint_at(path))))
        advice = meaning_of(path) or f"set one of its settings, such as config.{path}.{example}"
        raise SettingError(f"config.{path} is a section: {advice}")
    if not isinstance(value, Sequence) or isinstance(value, str):
        example = f"--config.{path}.NAME.{next(iter(fields_of(item)))}=VALUE"
        expected = f"a dictionary of {NAMED[item]}s by name; to set one value, use {example}"
        raise SettingError(invalid_value(path, value, expected))
    items: dict[str, Any] = {}
    for index, fields in enumerate(value):
        name = fields.get("name") if isinstance(fields, Mapping) else getattr(fields, "name", None)
        if not isinstance(name, str):
            raise SettingError(
                f"invalid {NAMED[item]} {index} of config.{path}: expected a dictionary with a name"
            )
        if name in items:
            names = ", ".join((*items, name))
            raise SettingError(f"config.{path} has two {NAMED[item]}s of the same name: {names}")
        items[name] = {key: field for key, field in fields.items() if key != "name"}
    return items


def is_part(hint: Any) -> bool:
    """Whether a declared type has settings in it, as sections, sources and stages, or a group of
    them, have.
    """
    return dataclasses.is_dataclass(hint) or item_of(hint) is not None


def is_placeholder(path: str) -> bool:
    """Whether the setting is None until it is set: its default comes from the preset, from
    model.init_from, or from other lengths of the run.
    """
    return path in ("data.tokenizer", "data.start_token", "train.steps") or (
        path.startswith("model.")
        and not path.startswith("model.kinds")
        and not is_part(hint_at(path))
    )


def converted(path: str, value: Any) -> Any:
    """`value` with the types declared at `path`. A part is a dictionary of what is set in it.

    Raises:
      SettingError: an unknown setting, or an invalid value.
    """
    hint = hint_at(path)
    if is_part(hint):
        return {
            name: converted(joined(path, name), item)
            for name, item in renamed(path, items_of(path, value)).items()
        }
    if value is None and is_placeholder(path):
        return None
    value = typed(path, value, hint)
    if path == "model.preset" and value not in PRESETS:
        raise SettingError(invalid_value(path, value, f"one of {', '.join(PRESETS)}", PRESETS))
    return value


def set_at(tree: Any, path: str, value: Any) -> None:
    """Sets the value at a path such as "data.mixture.books.share" in nested dictionaries; a new NAME adds a source.

    Raises:
      SettingError: there is no such setting or stage; in `jaxlc.config.defaults()` also as `converted`.
    """
    if not path:
        raise SettingError(_unknown(Config, "", path))
    hint_at(path)
    *parts, name = new_path(path).split(".")
    for part in parts:
        if isinstance(tree, (dict, ConfigDict)) and part not in tree:
            tree[part] = {}
        tree = tree[part]
    if not isinstance(tree, (dict, ConfigDict)):  # the stages of a config
        items_of(path, None)
    tree[name] = value


class Settings(ConfigDict):
    """A part of the settings: all, as `defaults()` returns them, a section, the sources of a
    mixture, or a stage.

    Values are converted to their declared types, as on the command line. Ranges and contradictions
    are checked later, by `load`. Sources and stages have only the values that are set.
    """

    def __init__(
        self, path: str = "", values: Mapping[str, Any] | None = None, is_locked: bool = False
    ):
        """The part at `path`, such as "", "data" or "data.mixture.NAME", with `values` on top of
        its defaults.
        """
        super().__init__(type_safe=False, convert_dict=False)
        object.__setattr__(self, "_path", path)
        for name, value in {**_initial_values(path), **(values or {})}.items():
            self[name] = value
        if is_locked:
            self.lock()

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets a value, or a whole part. A dictionary for a section sets its values on top of the
        defaults.

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
            value = Stages(
                Settings(f"{path}.{name}", fields) for name, fields in items_of(path, value).items()
            )
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
        part = hint_at(self._path)
        path = joined(self._path, attribute)
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
        raise SettingError(
            f"config.{path} is not set: the stage has the value of config.{path.split('.', 2)[2]}"
        )

    def update_from_flattened_dict(
        self, flattened_dict: Mapping[str, Any], strip_prefix: str = ""
    ) -> None:
        """Sets values by their paths: {"mesh.context": 8}; see
        `ConfigDict.update_from_flattened_dict`.

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
        return Settings, (
            self._path,
            dict(self.items(preserve_field_references=True)),
            self.is_locked,
        )

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
            return preformatted(str(self))
        values = {self._path: self.to_dict()} if self._path else self.to_dict()
        preset = values.get("model", {}).get("preset") or DEFAULT_PRESET
        title = f"Settings of {self._path}" if self._path else "Settings"
        return frozen.as_html(title, values, default_values(preset))


# not a tuple: a FrozenConfigDict contains no tuples of ConfigDicts
class Stages(Sequence[Settings]):
    """The stages of a config in their order; each is also an attribute by its name:
    config.stages.long.steps.
    """

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

    `model.preset` names a model; the other fields of `model` are placeholders that mean "as in the
    preset" until set. `data.tokenizer` is a placeholder that means the tokenizer of
    `model.init_from`, or bytes; `train.steps` means the default if no other length is set.
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
    values = {
        name: empty if is_part(hint_at(f"{path}.{name}")) else value
        for name, value in values.items()
    }
    unset = [
        name
        for name in values
        if is_placeholder(f"{path}.{name}") and name not in ("preset", "init_from")
    ]
    return values | {name: config_dict.placeholder(object) for name in unset}
