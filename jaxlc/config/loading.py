"""The one door: an editable ConfigDict outside, checked and frozen dataclasses inside. Imports no jax."""

import dataclasses
import difflib
import math
import numbers
import typing
from collections.abc import Iterable
from typing import Any, Literal

from ml_collections import ConfigDict, config_dict

from jaxlc.config.checks import check
from jaxlc.config.presets import PRESETS
from jaxlc.config.schema import Config, ModelConfig
from jaxlc.core.errors import UserError

SECTIONS: dict[str, type] = typing.get_type_hints(Config)
_DEFAULT_PRESET = "tiny"


def field_types(section: str) -> dict[str, Any]:
    """The fields of a section and their declared types: {"data": int, ...} for "mesh"."""
    return typing.get_type_hints(SECTIONS[section])


def defaults() -> ConfigDict:
    """Every setting at its default, for a config file to edit.

    `model` is a preset's name; its other fields are placeholders, which mean "as in the preset" until set.
    """
    shape = {name: config_dict.placeholder(hint) for name, hint in field_types("model").items()}
    sections = {name: dataclasses.asdict(cls()) for name, cls in SECTIONS.items() if cls is not ModelConfig}
    return ConfigDict({"model": shape | {"preset": _DEFAULT_PRESET}, **sections})


def load(config: ConfigDict | Config) -> Config:
    """Checks a config and freezes it. What it leaves out has its default; a Config is checked again.

    Raises:
      UserError: an unknown key, a value of the wrong type or out of range, or two values that contradict each
        other. One sentence, with the value and what to do.
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
    """The config with other values, by their paths: {"mesh.context": 8}.

    Raises:
      UserError: as `load`.
    """
    values = to_dict(config)
    for path, value in settings.items():
        section, _, name = path.partition(".")
        values[section][name] = value
    return load(ConfigDict(values))


def transport_settings(transport: str) -> dict[str, Any]:
    """What `transport` takes: NVSHMEM's heap goes with NVSHMEM."""
    heap = {} if transport in ("auto", "nvshmem") else {"runtime.nvshmem_heap_bytes": 0}
    return {"runtime.transport": transport} | heap


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as plain JSON types; `load(ConfigDict(to_dict(config)))` is `config` again."""
    values = dataclasses.asdict(config)
    return {
        section: {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        for section, fields in values.items()
    }


# Settings that were renamed before version 0.2: old path -> new path.
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


def check_key(path: str) -> None:
    """Raises UserError unless `path` is a setting such as "mesh.context"; names the nearest one."""
    if path in RENAMED:
        raise UserError(f"config.{path} was renamed: use config.{RENAMED[path]}")
    section, _, name = path.partition(".")
    if section not in SECTIONS or (name and name not in field_types(section)):
        raise UserError(f"there is no config.{path}; {_nearest_key(path)}")
    if not name:
        example = next(iter(field_types(section)))
        raise UserError(f"config.{section} is a section; set a key in it, such as config.{section}.{example}")


def _nearest_key(path: str) -> str:
    keys = [f"{section}.{name}" for section in SECTIONS for name in field_types(section)]
    same_name = [key for key in keys if key.endswith("." + path.rpartition(".")[2])]
    nearest = same_name or difflib.get_close_matches(path, [*keys, *SECTIONS], n=1)
    return did_you_mean([f"config.{key}" for key in nearest], [f"config.{section}" for section in SECTIONS])


def did_you_mean(nearest: list[str], known: Iterable[str]) -> str:
    """A question with the nearest names, or a list of the known ones where none is near."""
    return f"did you mean {' or '.join(nearest)}?" if nearest else f"there are {', '.join(sorted(known))}"


def _checked_section(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with their declared types; for the model, on top of its preset."""
    hints = field_types(section)
    is_set = {name: value for name, value in values.items() if value is not None or section != "model"}
    checked = {name: _typed(f"{section}.{name}", value, hints[name]) for name, value in is_set.items()}
    if section != "model":
        return checked
    preset = checked.get("preset", _DEFAULT_PRESET)
    if preset not in PRESETS:
        nearest = difflib.get_close_matches(preset, PRESETS, n=1)
        raise UserError(f"config.model.preset is {preset!r}, which is no preset; {did_you_mean(nearest, PRESETS)}")
    return dataclasses.asdict(PRESETS[preset]) | checked


def _typed(path: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`; an int serves as a float, and nothing else serves as another."""
    is_bool = isinstance(value, bool)
    if typing.get_origin(hint) is Literal:
        if value in typing.get_args(hint):
            return value
    elif typing.get_origin(hint) is tuple:
        item_hint, _ = typing.get_args(hint)
        if isinstance(value, (list, tuple)):
            # On a command line "0,-1" are two strings.
            items = tuple(map(_whole_number, value)) if item_hint is int else tuple(value)
            if all(type(item) is item_hint for item in items):
                return items
    elif hint is float:
        if isinstance(value, numbers.Real) and not is_bool and math.isfinite(value):
            return float(value)
    elif hint is int:
        if isinstance(value, numbers.Integral) and not is_bool:
            return int(value)
    elif isinstance(value, hint):
        return value
    raise UserError(f"config.{path} is {value!r}, which is not {describe_type(hint)}")


def _whole_number(value: Any) -> Any:
    """The int that `value` is or spells; anything else as it is."""
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    is_spelled = isinstance(value, str) and value.removeprefix("-").isdecimal()
    return int(value) if is_number or is_spelled else value


def describe_type(hint: Any) -> str:
    """A declared type in words: "a whole number"."""
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(hint)))}"
    if typing.get_origin(hint) is tuple:
        return {int: "a list of whole numbers", str: "a list of strings"}[typing.get_args(hint)[0]]
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}[hint]
