"""The stages of a config while it is edited: parsing, and changes of single settings. Imports no jax.

`jaxlc.config.stages` resolves them to complete configs.
"""

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ml_collections import ConfigDict

from jaxlc.config.checks.eval_checks import parse_min_scores
from jaxlc.config.frozen import SECTIONS, field_types
from jaxlc.config.loading import check_key
from jaxlc.config.mixture import is_mixture, is_source_path, merged_mixture, parse_mixture, split_source_path
from jaxlc.config.values import SettingError, invalid_value, typed
from jaxlc.core.suggestions import did_you_mean

# Settings that a stage may change: whole sections, and single settings of others. The rest belongs to the run.
_SECTIONS = ("attention", "data", "evals", "memory", "mesh", "optimizer", "train")
_MODEL_PREFIXES = ("rope_theta", "rope_scaling", "sliding_rope_theta")
_OF_THE_RUN = ("data.tokenizer", "data.end_token", "train.seed", "train.keep_checkpoints")


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage: its name, length and border, and the settings that it changes, as --config.stages.NAME.SECTION.KEY."""

    name: str  # name of the stage in metrics, plots and messages: letters, digits, "_", "-"
    steps: int = 0  # optimizer steps of the stage; 0: those of tokens
    tokens: int = 0  # tokens of the stage, padding included, rounded up to whole steps; 0: those of steps
    # learning-rate schedule. new: that of the stage's optimizer settings, over its own steps, with its own warm-up.
    # continue: the stage before started a schedule over the steps of both.
    schedule: Literal["new", "continue"] = "new"
    # moments and update count of the optimizer at the start of the stage: of the stage before, or zero.
    optimizer_state: Literal["carry", "reset"] = "carry"
    # gate: with a held-out loss above this limit at its end, in nats, the run stops before the next stage. 0: none.
    max_eval_loss: float = 0.0
    # gate: with a score of config.evals below its limit at its end, the run stops before the next stage; a list of
    # TASK@LENGTH=SCORE, such as needle@65536=80, in percent, and in nats for context_gain_N.
    min_scores: tuple[str, ...] = ()
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # section -> name -> value

    def changed(self, **values: Any) -> "StageConfig":
        """The stage with other values: fields, and dictionaries of settings by section, which are merged.

        Raises:
          SettingError: as `parse_stages`.
        """
        sections = {
            name: {**self.overrides.get(name, {}), **value}
            for name, value in values.items()
            if name in SECTIONS and isinstance(value, Mapping)
        }
        return _parse_stage(_as_dict(self) | values | sections, 0)


OWN_FIELDS = {name: hint for name, hint in typing.get_type_hints(StageConfig).items() if name != "overrides"}


def parse_stages(value: Any) -> tuple[StageConfig, ...]:
    """`value` as the stages of a config: a list of dictionaries, or of `StageConfig`.

    Raises:
      SettingError: an unknown setting, one that a stage cannot change, or a value of a wrong type.
    """
    if not isinstance(value, (list, tuple)):
        raise SettingError(f"invalid value {value!r} for config.stages: expected a list of dictionaries")
    stages = tuple(item if isinstance(item, StageConfig) else _parse_stage(item, i) for i, item in enumerate(value))
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise SettingError(f"config.stages has two stages of the same name: {', '.join(names)}")
    return stages


def with_stage_setting(stages: Sequence[StageConfig], path: str, value: Any) -> tuple[StageConfig, ...]:
    """The stages with another value of one setting.

    Args:
      path: "NAME.steps" or "NAME.data.seq_len".
    Raises:
      SettingError: there is no such stage; and as `parse_stages`.
    """
    name, _, setting = path.partition(".")
    names = [stage.name for stage in stages]
    if name not in names:
        known = did_you_mean(name, names) if names else "this config has no stages"
        raise SettingError(f"unknown stage config.stages.{name}: {known}")
    section, _, key = setting.partition(".")
    stage = stages[names.index(name)]
    if is_source_path(f"{section}.{key}"):
        source, source_field = split_source_path(f"{section}.{key}")
        mixture = stage.overrides.get("data", {}).get("mixture", {})
        key, value = "mixture", merged_mixture(mixture, {source: {source_field: value}})
    new = stage.changed(**{section: {key: value} if key else value})
    return tuple(new if other is stage else other for other in stages)


def _parse_stage(item: Any, index: int) -> StageConfig:
    if not isinstance(item, (Mapping, ConfigDict)) or not item.get("name"):
        raise SettingError(f"invalid stage {index} of config.stages: expected a dictionary with a name")
    name = item["name"]
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise SettingError(invalid_value("stages", name, 'a name of letters, digits, "_" and "-"'))
    fields: dict[str, Any] = {}
    overrides: dict[str, dict[str, Any]] = {}
    for key, value in item.items():
        if key in OWN_FIELDS:
            fields[key] = typed(f"stages.{name}.{key}", value, OWN_FIELDS[key])
            continue
        if key not in SECTIONS:
            known = [*OWN_FIELDS, "model", *_SECTIONS]
            question = did_you_mean(key, known, f"config.stages.{name}.{{}}")
            raise SettingError(f"unknown setting config.stages.{name}.{key}: {question}")
        if not isinstance(value, (Mapping, ConfigDict)):
            raise SettingError(invalid_value(f"stages.{name}.{key}", value, f"a dictionary of settings of {key}"))
        for setting in value:
            _check_may_change(name, f"{key}.{setting}")
        hints = field_types(key)
        overrides[key] = {
            setting: parse_mixture(v)
            if is_mixture(key, setting)
            else typed(f"stages.{name}.{key}.{setting}", v, hints[setting])
            for setting, v in value.items()
        }
    parse_min_scores(fields.get("min_scores", ()), f"stages.{name}.min_scores")
    for key in ("steps", "tokens", "max_eval_loss"):
        if fields.get(key, 0) < 0:
            raise SettingError(invalid_value(f"stages.{name}.{key}", fields[key], "at least 0"))
    return StageConfig(**fields, overrides=overrides)


def _check_may_change(name: str, path: str) -> None:
    """Checks that a stage may change the setting.

    Raises:
      SettingError: there is no such setting, or it belongs to the run.
    """
    check_key(path)
    section, _, setting = path.partition(".")
    if path == "train.steps":
        raise SettingError(f"config.stages.{name}.train.steps: set config.stages.{name}.steps, its own number of steps")
    may_change = section in _SECTIONS and path not in _OF_THE_RUN
    if not may_change and not (section == "model" and setting.startswith(_MODEL_PREFIXES)):
        reason = "stages change only RoPE settings of the model" if section == "model" else "all stages share it"
        raise SettingError(f"unsupported: config.stages.{name}.{path}; {reason}, so set config.{path}")


def _as_dict(stage: StageConfig) -> dict[str, Any]:
    """The dictionary from which `_parse_stage` makes the stage."""
    return {name: getattr(stage, name) for name in OWN_FIELDS} | {k: dict(v) for k, v in stage.overrides.items()}
