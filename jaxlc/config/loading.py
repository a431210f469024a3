"""From an editable ConfigDict to checked and frozen dataclasses. Imports no jax."""

import dataclasses
import difflib
import math
import numbers
import typing
from collections.abc import Iterable
from typing import Any, Literal

from ml_collections import ConfigDict, config_dict

from jaxlc.config.checks import check
from jaxlc.config.presets import PRESETS, RENAMED_PRESETS
from jaxlc.config.schema import Config, ModelConfig
from jaxlc.core.errors import UserError

SECTIONS: dict[str, type] = typing.get_type_hints(Config)
_DEFAULT_PRESET = "tiny"

# Old path -> new path. Checkpoints written under the old names still resume: only the model's settings are compared.
RENAMED = {
    "attention.ulysses_ranks": "attention.ulysses_degree",
    "data.sequence_tokens": "data.seq_len",
    "memory.keep": "memory.save",
    "memory.remat_layers": "memory.layers_per_remat_group",
    "optimizer.clip_norm": "optimizer.max_grad_norm",
    "precision.fp8_history_steps": "precision.fp8_amax_history_len",
    "precision.loss_scale_backoff": "precision.loss_scale_backoff_factor",
    "precision.loss_scale_growth": "precision.loss_scale_growth_factor",
    "precision.loss_scale_growth_steps": "precision.loss_scale_growth_interval",
    "train.accumulation_steps": "train.gradient_accumulation_steps",
    "train.eval_rows": "train.eval_sequences",
    "train.rows_per_step": "train.global_batch_size",
}


class Settings(ConfigDict):
    """A ConfigDict that accepts in Python what the command line accepts: 1e3 for an integer, and a string or a list for
    a tuple. Other values of a wrong type raise TypeError at once."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.keys():
            kind = self.get_type(key)
            if kind is int:
                value = _as_integer(value)
            elif kind is tuple:
                value = _as_tuple(value)
        super().__setitem__(key, value)


def field_types(section: str) -> dict[str, Any]:
    """The fields of a section and their declared types: {"data": int, ...} for "mesh"."""
    return typing.get_type_hints(SECTIONS[section])


def defaults() -> ConfigDict:
    """All settings with their default values, for a config file to edit.

    `model.preset` names a model; the other fields of `model` are placeholders that mean "as in the preset" until set.
    """
    shape = {name: config_dict.placeholder(hint) for name, hint in field_types("model").items()}
    sections = {name: dataclasses.asdict(cls()) for name, cls in SECTIONS.items() if cls is not ModelConfig}
    sections["model"] = shape | {"preset": _DEFAULT_PRESET}
    return Settings({name: Settings(sections[name]) for name in SECTIONS})


def load(config: ConfigDict | Config) -> Config:
    """Checks a config and freezes it. Missing settings get their defaults; a Config is checked again.

    Raises:
      UserError: an unknown setting, a value of the wrong type or out of range, or two values that contradict each
        other. The message is one line with the value and what to do.
    """
    values = to_dict(config) if isinstance(config, Config) else config.to_dict()
    for section, section_values in values.items():
        if section not in SECTIONS or not isinstance(section_values, dict):
            check_key(section)
        for name in section_values:
            check_key(f"{section}.{name}")
    sections = {section: _checked_section(section, values.get(section, {})) for section in SECTIONS}
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
        values[section][name] = value
    return load(ConfigDict(values))


def transport_settings(transport: str) -> dict[str, Any]:
    """The settings that select a transport; the NVSHMEM heap is reset for transports other than NVSHMEM."""
    heap: dict[str, Any] = {} if transport in ("auto", "nvshmem") else {"runtime.nvshmem_heap_bytes": 0}
    return {"runtime.transport": transport} | heap


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as plain JSON types; `load(ConfigDict(to_dict(config)))` equals `config`."""
    values = dataclasses.asdict(config)
    return {
        section: {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        for section, fields in values.items()
    }


def check_key(path: str) -> None:
    """Checks that `path` is a setting such as "mesh.context".

    Raises:
      UserError: it is not; the message names the nearest setting, or the new name of a renamed one.
    """
    if path in RENAMED:
        raise UserError(f"config.{path} was renamed: use config.{RENAMED[path]}")
    section, _, name = path.partition(".")
    if section not in SECTIONS or (name and name not in field_types(section)):
        raise UserError(f"unknown setting config.{path}: {_nearest_key(path)}")
    if not name:
        example = next(iter(field_types(section)))
        raise UserError(f"config.{section} is a section: set one of its settings, such as config.{section}.{example}")


def _nearest_key(path: str) -> str:
    keys = [f"{section}.{name}" for section in SECTIONS for name in field_types(section)]
    section, _, name = path.rpartition(".")
    same_name = [key for key in keys if key.endswith("." + name)]
    nearest = same_name or difflib.get_close_matches(path, [*keys, *SECTIONS], n=1)
    known = [f"{section}.{field}" for field in field_types(section)] if section in SECTIONS else SECTIONS
    return did_you_mean([f"config.{key}" for key in nearest], [f"config.{key}" for key in known])


def did_you_mean(nearest: list[str], known: Iterable[str]) -> str:
    """A question with the nearest names, or the list of the known names if none is near."""
    return f"did you mean {' or '.join(nearest)}?" if nearest else f"expected one of {', '.join(sorted(known))}"


def _checked_section(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with their declared types; for the model, on top of its preset."""
    hints = field_types(section)
    is_set = {name: value for name, value in values.items() if value is not None or section != "model"}
    checked = {name: _typed(f"{section}.{name}", value, hints[name]) for name, value in is_set.items()}
    if section != "model":
        return checked
    preset = checked.get("preset", _DEFAULT_PRESET)
    if preset in RENAMED_PRESETS:
        raise UserError(f"the preset {preset!r} was renamed: use --config.model.preset={RENAMED_PRESETS[preset]}")
    if preset not in PRESETS:
        raise UserError(invalid_value("model.preset", preset, f"one of {', '.join(PRESETS)}", PRESETS))
    return dataclasses.asdict(PRESETS[preset]) | checked


def invalid_value(path: str, value: Any, expected: str, names: Iterable[str] = ()) -> str:
    """The error for a value: "invalid value VALUE for SETTING: expected ... (did you mean X?)".

    Args:
      names: the valid values, if they are strings; the nearest one is suggested.
    """
    nearest = difflib.get_close_matches(value, list(names), n=1) if isinstance(value, str) else []
    question = f" (did you mean {nearest[0]}?)" if nearest else ""
    return f"invalid value {value!r} for config.{path}: expected {expected}{question}"


def _typed(path: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`: an integer is accepted as a float, 1e3 as an integer, "a,b" as a tuple."""
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value in choices:
            return value
        raise UserError(invalid_value(path, value, describe_type(hint), choices))
    if typing.get_origin(hint) is tuple:
        item_hint, _ = typing.get_args(hint)
        items = _as_tuple(value)
        if isinstance(items, tuple):
            items = tuple(map(_as_integer, items)) if item_hint is int else items
            if all(type(item) is item_hint for item in items):
                return items
    elif hint is float:
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint is int:
        if type(_as_integer(value)) is int:
            return _as_integer(value)
    elif isinstance(value, hint):
        return value
    raise UserError(invalid_value(path, value, describe_type(hint)))


def _as_integer(value: Any) -> Any:
    """The int that a number or a string such as "-1" or "1e3" equals; any other value unchanged."""
    number = value
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            try:
                number = float(value)
            except ValueError:
                return value
    if isinstance(number, bool) or not isinstance(number, numbers.Real) or not math.isfinite(number):
        return value
    return math.floor(number) if number == math.floor(number) else value


def _as_tuple(value: Any) -> Any:
    """The tuple of a list, or of a string with commas; any other value unchanged."""
    if isinstance(value, str):
        return tuple(value.split(","))
    return tuple(value) if isinstance(value, list) else value


def parse_integer(text: str) -> int:
    """An integer of a command line: "1000", "-1" or "1e3".

    Raises:
      ValueError: it is none.
    """
    number = _as_integer(text)
    if type(number) is not int:
        raise ValueError(f"{text!r} is not an integer")
    return number


def describe_type(hint: Any) -> str:
    """A declared type in words: "an integer"."""
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(hint)))}"
    if typing.get_origin(hint) is tuple:
        return {int: "a list of integers", str: "a list of strings"}[typing.get_args(hint)[0]]
    return {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}[hint]
