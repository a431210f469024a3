"""The config.json of models that no family of transformers computes: their settings, under model_type "jaxlc".

Tensors have the names that most families use. `model.init_from`, generation and evaluation read such a directory as any
other; transformers does not. Imports no jax.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from jaxlc.config.kinds import experts
from jaxlc.config.models.families import COMMON_SETTINGS, Family
from jaxlc.config.models.model_schema import SECTIONS_OF_MODEL, ModelConfig
from jaxlc.config.old_names import renamed
from jaxlc.config.values import flattened, plain, typed
from jaxlc.core.errors import UserError

MODEL_TYPE, _ARCHITECTURE = "jaxlc", "JaxlcForCausalLM"
_SETTINGS = "model"  # the field of config.json with the settings of ModelConfig
_NO_SETTINGS = ("preset", "init_from")  # fields that describe no computation


def is_own_format(config: Mapping[str, Any]) -> bool:
    """Whether this is the content of a config.json of this format."""
    return config.get("model_type") == MODEL_TYPE


def family_of_own_format(model: ModelConfig) -> Family:
    """The names of the tensors of `model` in this format."""
    tensors = experts.STACKED_TENSORS if model.experts.bias else experts.TENSORS
    tensors = (*tensors, *experts.shared_tensors("shared_expert"), experts.CHOICE_BIAS)
    return Family(
        model_type=MODEL_TYPE,
        architecture=_ARCHITECTURE,
        settings={path: model.by_path[path] for path in COMMON_SETTINGS},
        feed_forward_tensors=dict(experts=tensors) if model.experts.num_experts else {},
    )


def own_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json for `model`, which `stored_settings` reads."""
    settings = {name: plain(value) for name, value in vars(model).items() if name not in _NO_SETTINGS}
    settings["kinds"] = {kind.name: {**dataclasses.asdict(kind)} for kind in model.kinds}
    for kind in settings["kinds"].values():
        kind.pop("name")
    return {"architectures": [_ARCHITECTURE], "model_type": MODEL_TYPE, _SETTINGS: settings}


def own_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of ModelConfig in a config.json of this format.

    Args:
      config: the content of config.json.
      where: its path, for errors.
    Raises:
      UserError: they are missing or invalid, or of another version.
    """
    settings = config.get(_SETTINGS)
    if not isinstance(settings, dict):
        raise UserError(f"{where} has no object {_SETTINGS!r}; export the model again")
    known = stored_settings(settings, where)
    sections = {f"{name}.{key}" for name, part in SECTIONS_OF_MODEL.items() for key in vars(part())}
    names = {field.name for field in dataclasses.fields(ModelConfig)} - SECTIONS_OF_MODEL.keys() | sections
    missing = [name for name in sorted(names) if name not in (*known, *_NO_SETTINGS)]
    if missing:
        raise UserError(f"{where} has no setting model.{missing[0]}: it is incomplete or of another version of jaxlc")
    return known


def stored_settings(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of ModelConfig, without preset and init_from, from JSON types.

    Raises:
      UserError: a setting is unknown or has another type.
    """
    hints = typing.get_type_hints(ModelConfig)
    for name, part in SECTIONS_OF_MODEL.items():
        hints |= {f"{name}.{setting}": hint for setting, hint in typing.get_type_hints(part).items()}
    settings = renamed("model", stored)
    kinds = {"kinds": settings.pop("kinds")} if "kinds" in settings else {}
    known = flattened(settings) | kinds
    unknown = sorted({*known} - {*hints})
    if unknown:
        raise UserError(f"{where} has the unknown setting model.{unknown[0]}: it is of another version of jaxlc")
    return {
        path: value if isinstance(value, dict) else typed(f"model.{path}", value, hints[path])
        for path, value in known.items()
        if path not in _NO_SETTINGS
    }
