"""Stages: parts of a run with their own length, RoPE, schedule, mesh and data, which one command trains in order.

`config.stages` is a list of dictionaries. Each has the fields of `StageConfig` and, by section, the settings that the
stage changes: `dict(name="64k", steps=5000, data=dict(seq_len=65_536), model=dict(rope_theta=8e6))`. `load_stages`
resolves each stage to a complete `Config`. Imports no jax.
"""

import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ml_collections import ConfigDict

from jaxlc.config.eval_checks import gate_names, parse_min_scores
from jaxlc.config.frozen import SECTIONS, Config, field_types
from jaxlc.config.loading import check_key, load
from jaxlc.config.mixture import is_mixture, is_source_path, merged_mixture, parse_mixture, split_source_path
from jaxlc.config.schema import DataConfig, TrainConfig
from jaxlc.config.values import SettingError, did_you_mean, invalid_value, typed
from jaxlc.core.errors import UserError

# Settings that a stage may change: whole sections, and single settings of others. The rest belongs to the run.
_SECTIONS = ("attention", "data", "evals", "memory", "mesh", "optimizer", "train")
_MODEL_PREFIXES = ("rope_theta", "rope_scaling", "sliding_rope_theta")
_OF_THE_RUN = ("data.tokenizer", "data.end_token", "train.seed", "train.keep_checkpoints")
_SCHEDULE = (
    "learning_rate",
    "schedule",
    "warmup_steps",
    "decay_steps",
    "initial_learning_rate_ratio",
    "final_learning_rate_ratio",
)


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
        sections = {name: {**self.overrides.get(name, {}), **values[name]} for name in values.keys() & SECTIONS.keys()}
        return _parse_stage(_as_dict(self) | values | sections, 0)


OWN_FIELDS = {name: hint for name, hint in typing.get_type_hints(StageConfig).items() if name != "overrides"}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage that `load_stages` resolved. A config without stages is one stage without a name."""

    name: str
    config: Config  # complete; train.steps is the global step at which the stage ends
    first_step: int = 0  # global: optimizer steps of the stages before
    optimizer_state: str = "carry"
    max_eval_loss: float = 0.0  # 0: no gate
    min_scores: tuple[str, ...] = ()  # empty: no gate

    @property
    def end_step(self) -> int:
        """The global step after the last step of this stage."""
        return self.config.train.steps

    @property
    def num_steps(self) -> int:
        """Optimizer steps of this stage."""
        return self.end_step - self.first_step

    @property
    def num_tokens(self) -> int:
        """Tokens of this stage over all devices, padding included."""
        return self.num_steps * self.config.tokens_per_step


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
        known = did_you_mean([], names) if names else "this config has no stages"
        raise SettingError(f"unknown stage config.stages.{name}: {known}")
    section, _, key = setting.partition(".")
    stage = stages[names.index(name)]
    if is_source_path(f"{section}.{key}"):
        source, source_field = split_source_path(f"{section}.{key}")
        mixture = stage.overrides.get("data", {}).get("mixture", {})
        key, value = "mixture", merged_mixture(mixture, {source: {source_field: value}})
    new = stage.changed(**{section: {key: value} if key else value})
    return tuple(new if other is stage else other for other in stages)


def load_stages(config: "ConfigDict | Config | tuple[Stage, ...]") -> tuple[Stage, ...]:
    """Checks and freezes every stage of a config; one stage without a name if it has none. Loaded stages are returned.

    Raises:
      UserError: as `load`, with the name of the stage; or two stages that contradict each other.
    """
    if isinstance(config, tuple):
        return config
    if not isinstance(config, ConfigDict) or not config.get("stages"):
        return (Stage(name="", config=load(config)),)
    values = config.to_dict()
    stage_configs = parse_stages(values.pop("stages"))
    _raise_first(_contradictions(stage_configs))
    merged = [_merged(values, stage, index) for index, stage in enumerate(stage_configs)]
    num_steps = [_num_steps(stage, settings) for stage, settings in zip(stage_configs, merged)]
    stages: list[Stage] = []
    first_step, reset_step = 0, 0
    for index, (stage, settings) in enumerate(zip(stage_configs, merged)):
        if stage.optimizer_state == "reset":
            reset_step = first_step
        head = max(i for i in range(index + 1) if stage_configs[i].schedule == "new")
        following = (i for i in range(head + 1, len(merged)) if stage_configs[i].schedule == "new")
        end = next(following, len(merged))
        schedule = {name: value for name, value in merged[head]["optimizer"].items() if name in _SCHEDULE}
        settings["optimizer"] |= schedule | {
            "schedule_steps": sum(num_steps[head:end]),
            "schedule_start": sum(num_steps[:head]) - reset_step,
        }
        settings["train"]["steps"] = first_step + num_steps[index]
        stages.append(
            Stage(
                name=stage.name,
                config=_load(stage.name, settings),
                first_step=first_step,
                optimizer_state=stage.optimizer_state,
                max_eval_loss=stage.max_eval_loss,
                min_scores=stage.min_scores,
            )
        )
        first_step = stages[-1].end_step
    _raise_first(_different_runs(stages))
    _raise_first(_missing_scores(stages))
    return tuple(stages)


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
            known = [f"stages.{name}.{own}" for own in (*OWN_FIELDS, *SECTIONS)]
            raise SettingError(f"unknown setting config.stages.{name}.{key}: {did_you_mean([], known)}")
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


def _merged(values: Mapping[str, Mapping[str, Any]], stage: StageConfig, index: int) -> dict[str, dict[str, Any]]:
    """The settings of a stage, explicit ones only; every section is a new dictionary.

    Stages have different orders of sequences, so that stages with the same sources do not repeat the same ones. The
    mixture of a stage names its sources; their other fields are those of the config's source of the same name.
    """
    merged = {section: dict(values.get(section, {})) | dict(stage.overrides.get(section, {})) for section in SECTIONS}
    own, data, mixture = stage.overrides.get("data", {}), merged["data"], values.get("data", {}).get("mixture") or {}
    if "seed" not in own:
        data["seed"] = data.get("seed", DataConfig().seed) + index
    if "mixture" in own:
        data["mixture"] = {name: {**mixture.get(name, {}), **fields} for name, fields in own["mixture"].items()}
    if "mixture" in own and "sources" not in own:
        data.pop("sources", None)
    if "sources" in own and "mixture" not in own:
        data.pop("mixture", None)
    return merged


def _num_steps(stage: StageConfig, settings: Mapping[str, Mapping[str, Any]]) -> int:
    """The optimizer steps of a stage.

    Raises:
      UserError: it has neither steps nor tokens, or both.
    """
    if (stage.steps > 0) == (stage.tokens > 0):
        wrong = "both steps and tokens" if stage.steps else "neither steps nor tokens"
        raise UserError(f"config.stages.{stage.name} has {wrong}: set one of them")
    seq_len = settings["data"].get("seq_len", DataConfig().seq_len)
    tokens_per_step = seq_len * settings["train"].get("global_batch_size", TrainConfig().global_batch_size)
    return stage.steps or -(-stage.tokens // max(1, tokens_per_step))


def _load(name: str, settings: dict[str, dict[str, Any]]) -> Config:
    try:
        return load(ConfigDict(settings))
    except UserError as error:
        raise UserError(f"stage {name}: {error}") from error


def _contradictions(stages: Sequence[StageConfig]) -> Iterator[str]:
    """Settings of stages that contradict each other, before they are resolved."""
    first, last = stages[0], stages[-1]
    for name, default in (("schedule", "new"), ("optimizer_state", "carry")):
        if getattr(first, name) != default:
            value = getattr(first, name)
            yield f"invalid value {value!r} for config.stages.{first.name}.{name}: expected {default!r} in stage one"
    if last.max_eval_loss:
        yield (
            f"config.stages.{last.name}.max_eval_loss={last.max_eval_loss} has no effect: no stage follows; use 0, or"
            " add a stage"
        )
    if last.min_scores:
        yield f"config.stages.{last.name}.min_scores has no effect: no stage follows; remove it, or add a stage"
    for stage in stages:
        if (stage.schedule, stage.optimizer_state) == ("continue", "reset"):
            yield (
                f"config.stages.{stage.name} has schedule='continue' and optimizer_state='reset': moments of zero need"
                f" a warm-up; use --config.stages.{stage.name}.schedule=new"
            )
        own = [key for key in _SCHEDULE if key in stage.overrides.get("optimizer", {})]
        if stage.schedule == "continue" and own:
            yield (
                f"config.stages.{stage.name}.optimizer.{own[0]} has no effect with its schedule='continue'; use"
                f" --config.stages.{stage.name}.schedule=new"
            )


def _different_runs(stages: Sequence[Stage]) -> Iterator[str]:
    """Resolved settings that must be equal in all stages."""
    first = stages[0]
    for stage in stages[1:]:
        if stage.config.mesh.num_devices != first.config.mesh.num_devices:
            yield (
                f"stage {stage.name} has a mesh of {stage.config.mesh.num_devices} devices and stage {first.name} one"
                f" of {first.config.mesh.num_devices}; a run uses the same devices in all stages"
            )
        if bool(stage.config.optimizer.max_grad_norm) != bool(first.config.optimizer.max_grad_norm):
            yield (
                f"unsupported: optimizer.max_grad_norm is 0 in one of the stages {first.name} and {stage.name} only,"
                " which changes the state of the optimizer; use a large value instead of 0"
            )


def _missing_scores(stages: Sequence[Stage]) -> Iterator[str]:
    """Gates that name a score which config.evals does not compute."""
    for stage in stages:
        names = gate_names(stage.config)
        for name in parse_min_scores(stage.min_scores, "min_scores"):
            if name not in names:
                known = did_you_mean(difflib.get_close_matches(name, names, n=1), names) if names else "no evals.tasks"
                yield f"config.stages.{stage.name}.min_scores: no score {name!r} in this stage: {known}"


def _raise_first(problems: Iterator[str]) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise UserError(problem)
